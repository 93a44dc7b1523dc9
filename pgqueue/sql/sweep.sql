-- pending -> running, in every lane of these queues (NULL: of all) and without floors: what claim.sql cannot see.
-- The lanes are found by jumping along the index from one (queue, priority) to the next.
WITH RECURSIVE found AS (
    (SELECT j.queue, j.priority FROM pgqueue.jobs_live j WHERE j.status = 'pending' AND NOT j.parked
     ORDER BY j.queue, j.priority DESC LIMIT 1)
    UNION ALL
    SELECT n.queue, n.priority
    FROM found f
    CROSS JOIN LATERAL (
        (SELECT j.queue, j.priority FROM pgqueue.jobs_live j
         WHERE j.status = 'pending' AND NOT j.parked AND j.queue = f.queue AND j.priority < f.priority
         ORDER BY j.priority DESC LIMIT 1)
        UNION ALL
        (SELECT j.queue, j.priority FROM pgqueue.jobs_live j
         WHERE j.status = 'pending' AND NOT j.parked AND j.queue > f.queue
         ORDER BY j.queue, j.priority DESC LIMIT 1)
        LIMIT 1
    ) n
), lane AS (
    SELECT array_agg(f.queue) AS queues, array_agg(f.priority) AS priorities
    FROM (SELECT f.queue, f.priority FROM found f
          WHERE (%(queues)s::text[] IS NULL OR f.queue = ANY (%(queues)s::text[]))
          ORDER BY f.priority DESC, random()) f
)
SELECT c.id, c.queue, c.type, c.payload, c.priority, c.seq, c.thread_demand, c.timeout, c.max_attempts, c.attempt, c.lost,
    c.idempotency_key, c.parked
FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
CROSS JOIN lane l
CROSS JOIN LATERAL pgqueue.claim_jobs(
    l.queues, l.priorities, NULL, %(types)s::text[], %(threads)s::int, %(largest)s::int, %(limit)s::int, %(worker_id)s::uuid,
    %(lease_token)s::uuid) c

-- pending -> running, in every lane of these queues (NULL: of all) and without floors: what claim.sql cannot see.
-- The lanes are found by jumping along the index from one (queue, priority) to the next, and each is taken from its first
-- job on. Rows with the id 0 tell the lanes and the seq of their first jobs, so that the next claims know where to look.
WITH RECURSIVE found AS (
    (SELECT j.queue, j.priority, j.seq FROM pgqueue.jobs_live j WHERE j.status = 'pending' AND NOT j.parked
     ORDER BY j.queue, j.priority DESC, j.seq LIMIT 1)
    UNION ALL
    SELECT n.queue, n.priority, n.seq
    FROM found f
    CROSS JOIN LATERAL (
        (SELECT j.queue, j.priority, j.seq FROM pgqueue.jobs_live j
         WHERE j.status = 'pending' AND NOT j.parked AND j.queue = f.queue AND j.priority < f.priority
         ORDER BY j.priority DESC, j.seq LIMIT 1)
        UNION ALL
        (SELECT j.queue, j.priority, j.seq FROM pgqueue.jobs_live j
         WHERE j.status = 'pending' AND NOT j.parked AND j.queue > f.queue
         ORDER BY j.queue, j.priority DESC, j.seq LIMIT 1)
        LIMIT 1
    ) n
), lane AS MATERIALIZED (
    SELECT f.queue, f.priority, f.seq FROM found f
    WHERE (%(queues)s::text[] IS NULL OR f.queue = ANY (%(queues)s::text[]))
    ORDER BY f.priority DESC, random()
), lanes AS (
    SELECT array_agg(l.queue) AS queues, array_agg(l.priority) AS priorities, array_agg(l.seq) AS floors FROM lane l
)
SELECT c.id, c.queue, c.type, c.payload, c.priority, c.seq, c.thread_demand, c.timeout, c.max_attempts, c.attempt, c.lost,
    c.idempotency_key, c.created, c.parked
FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
CROSS JOIN lanes l
CROSS JOIN LATERAL pgqueue.claim_jobs(
    l.queues, l.priorities, l.floors, %(types)s::text[], %(threads)s::int, %(limit)s::int,
    %(worker_id)s::uuid, %(lease_token)s::uuid) c
UNION ALL
SELECT 0, l.queue, '', '', l.priority, l.seq, 0, NULL, 0, 0, 0, NULL, 0, false FROM lane l

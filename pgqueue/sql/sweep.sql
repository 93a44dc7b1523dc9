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
), lane AS MATERIALIZED (
    SELECT f.queue, f.priority FROM found f
    WHERE (%(queues)s::text[] IS NULL OR f.queue = ANY (%(queues)s::text[]))
      AND NOT EXISTS (SELECT FROM pgqueue.queues q WHERE q.name = f.queue AND q.paused_at IS NOT NULL)
    ORDER BY f.priority DESC, random()
), taken AS MATERIALIZED (
    SELECT j.id, j.fits
    FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
    CROSS JOIN lane l
    CROSS JOIN LATERAL (
        SELECT j.id,
               (%(types)s::text[] IS NULL OR j.type = ANY (%(types)s::text[]))
               AND (j.thread_demand <= %(threads)s OR j.thread_demand > %(largest)s) AS fits
        FROM pgqueue.jobs_live j
        WHERE j.status = 'pending' AND NOT j.parked AND j.queue = l.queue AND j.priority = l.priority
        ORDER BY j.seq
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) j
    LIMIT %(limit)s
)
UPDATE pgqueue.jobs_live j
SET status = CASE WHEN t.fits THEN 'running'::pgqueue.status ELSE 'pending' END,
    parked = NOT t.fits,
    worker_id = CASE WHEN t.fits THEN %(worker_id)s::uuid END,
    lease_token = CASE WHEN t.fits THEN %(lease_token)s::uuid END,
    started_at = CASE WHEN t.fits THEN statement_timestamp() END,
    threads_used = NULL
FROM taken t
WHERE j.id = t.id
RETURNING j.id, j.queue, j.type, j.payload::text AS payload, j.priority, j.seq, j.thread_demand,
    extract(epoch FROM j.timeout)::float8 AS timeout, j.max_attempts, j.attempt, j.lost, j.idempotency_key,
    j.parked

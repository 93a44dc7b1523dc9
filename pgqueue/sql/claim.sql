-- pending -> running, in the lanes that the worker knows, each from its floor on.
-- A job that this worker cannot run is parked for one that can, so that nobody wades through it again.
-- The commit does not wait for the disk: a claim that a crash takes back is refused by its token.
WITH lane AS (
    SELECT l.* FROM unnest(%(queues)s::text[], %(priorities)s::int[], %(floors)s::bigint[])
        WITH ORDINALITY AS l(queue, priority, floor, place)
    WHERE NOT EXISTS (SELECT FROM pgqueue.queues q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
    ORDER BY l.place
), taken AS MATERIALIZED (
    SELECT j.id, j.fits
    FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
    CROSS JOIN lane l
    CROSS JOIN LATERAL (
        SELECT j.id,
               (%(types)s::text[] IS NULL OR j.type = ANY (%(types)s::text[]))
               AND (j.thread_demand <= %(threads)s OR j.thread_demand > %(largest)s) AS fits
        FROM pgqueue.jobs_live j
        WHERE j.status = 'pending' AND NOT j.parked
          AND j.queue = l.queue AND j.priority = l.priority AND j.seq >= l.floor
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

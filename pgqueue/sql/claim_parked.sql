-- pending and parked -> running, where this worker knows the type and has the threads (or nobody alive has).
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
WITH RECURSIVE found AS (
    (SELECT j.queue, j.type FROM pgqueue.jobs_live j WHERE j.status = 'pending' AND j.parked
     ORDER BY j.queue, j.type LIMIT 1)
    UNION ALL
    SELECT n.queue, n.type
    FROM found f
    CROSS JOIN LATERAL (
        SELECT j.queue, j.type FROM pgqueue.jobs_live j
        WHERE j.status = 'pending' AND j.parked AND (j.queue, j.type) > (f.queue, f.type)
        ORDER BY j.queue, j.type LIMIT 1
    ) n
), lane AS MATERIALIZED (
    SELECT f.queue, f.type, (
        SELECT coalesce(max(w.threads), 0) FROM pgqueue.workers w
        WHERE w.expires_at > statement_timestamp() AND w.stopped_at IS NULL AND NOT w.draining
          AND (w.queues IS NULL OR f.queue = ANY (w.queues)) AND (w.types IS NULL OR f.type = ANY (w.types))
    ) AS largest
    FROM found f
    WHERE (%(queues)s::text[] IS NULL OR f.queue = ANY (%(queues)s::text[]))
      AND (%(types)s::text[] IS NULL OR f.type = ANY (%(types)s::text[]))
      AND NOT EXISTS (SELECT FROM pgqueue.queues q WHERE q.name = f.queue AND q.paused_at IS NOT NULL)
), taken AS MATERIALIZED (
    SELECT j.id
    FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
    CROSS JOIN lane l
    CROSS JOIN LATERAL (
        SELECT j.id FROM pgqueue.jobs_live j
        WHERE j.status = 'pending' AND j.parked AND j.queue = l.queue AND j.type = l.type
          AND (j.thread_demand <= %(threads)s OR j.thread_demand > l.largest)
          AND (%(lowest)s::int IS NULL OR j.priority >= %(lowest)s::int)
        ORDER BY j.priority DESC, j.seq
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) j
    LIMIT %(limit)s
)
UPDATE pgqueue.jobs_live j
SET status = 'running', parked = false, worker_id = %(worker_id)s, lease_token = %(lease_token)s,
    started_at = statement_timestamp(), threads_used = NULL
FROM taken t
WHERE j.id = ANY (ARRAY[t.id])
RETURNING j.id, j.queue, j.type, j.payload::text AS payload, j.priority, j.seq, j.thread_demand,
    extract(epoch FROM j.timeout)::float8 AS timeout, j.max_attempts, j.attempt, j.lost, j.idempotency_key,
    date_part('epoch', j.created_at) AS created, j.parked

-- running -> scheduled (another attempt after delay), or -> failed when there is no delay or no attempt left.
-- Those that were asked to stop are left out, unless their effect is in doubt.
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
WITH ended AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(delays)s::float8[], %(reasons)s::text[],
                         %(error_types)s::text[], %(errors)s::text[], %(tracebacks)s::text[], %(threads)s::int[],
                         %(started_ago)s::float8[], %(ended_ago)s::float8[])
        AS e(id, lease_token, delay, reason, error_type, error, traceback, threads_used, started_ago, ended_ago)
), owned AS MATERIALIZED (
    SELECT j.id, e.delay IS NOT NULL AND j.attempt + 1 < j.max_attempts AS again, j.attempt + 1 AS attempt,
           j.queue, j.type, j.run_at, j.max_attempts, j.worker_id,
           e.delay, e.reason, e.error_type, e.error, e.traceback, e.threads_used,
           statement_timestamp() - make_interval(secs => e.started_ago) AS started_at,
           statement_timestamp() - make_interval(secs => e.ended_ago) AS finished_at
    FROM (SELECT * FROM ended ORDER BY id) e
    CROSS JOIN LATERAL (
        SELECT j.* FROM pgqueue.jobs_live j
        WHERE j.id = e.id AND j.lease_token = e.lease_token
          AND (j.cancel_requested_at IS NULL OR e.reason = 'in_doubt')
        FOR UPDATE
    ) j
    WHERE (SELECT set_config('lock_timeout', coalesce(%(patience)s::text, current_setting('lock_timeout')), true)) IS NOT NULL
), again AS (
    UPDATE pgqueue.jobs_live j
    SET status = 'scheduled', run_at = statement_timestamp() + make_interval(secs => o.delay), attempt = o.attempt,
        worker_id = NULL, lease_token = NULL, reason = o.reason, error_type = o.error_type, error = o.error,
        threads_used = o.threads_used, started_at = o.started_at
    FROM owned o WHERE j.id = ANY (ARRAY[o.id]) AND o.again
), gone AS (
    DELETE FROM pgqueue.jobs_live j USING owned o WHERE j.id = ANY (ARRAY[o.id]) AND NOT o.again
    RETURNING j.*
), dead AS (
    INSERT INTO pgqueue.jobs_failed (id, queue, type, name, payload, status, priority, seq, run_at, thread_demand, timeout,
        max_attempts, attempt, lost, idempotency_key, tags, created_at, worker_id, lease_token, threads_used, started_at,
        cancel_requested_at, progress, finished_at, reason, error_type, error)
    SELECT g.id, g.queue, g.type, g.name, g.payload, 'failed', g.priority, g.seq, g.run_at, g.thread_demand, g.timeout,
        g.max_attempts, o.attempt, g.lost, g.idempotency_key, g.tags, g.created_at, g.worker_id, g.lease_token, o.threads_used,
        o.started_at, g.cancel_requested_at, g.progress, o.finished_at,
        CASE WHEN o.reason IN ('error', 'timeout') AND o.delay IS NOT NULL AND o.attempt >= g.max_attempts
             THEN 'max_attempts' ELSE o.reason END,
        o.error_type, o.error
    FROM gone g JOIN owned o USING (id)
), counted AS (
    INSERT INTO pgqueue.tallies (event, queue, type, reason, attempt, took, seconds, waited, wait_seconds, jobs)
    SELECT CASE WHEN again THEN 'retried' ELSE 'failed' END, queue, type, reason, attempt, pgqueue.bucket(seconds),
           sum(seconds), pgqueue.bucket(wait_seconds), sum(wait_seconds), count(*)
    FROM (SELECT *, date_part('epoch', finished_at - started_at) AS seconds,
                 greatest(0, date_part('epoch', started_at - run_at)) AS wait_seconds FROM owned) o
    GROUP BY 1, 2, 3, 4, 5, 6, 8
), exhausted AS (
    INSERT INTO pgqueue.tallies (event, queue, type, attempt, jobs)
    SELECT 'exhausted', queue, type, attempt, count(*) FROM owned
    WHERE NOT again AND reason IN ('error', 'timeout') AND delay IS NOT NULL AND attempt >= max_attempts
    GROUP BY 2, 3, 4
), history AS (
    INSERT INTO pgqueue.attempts (job_id, attempt, outcome, reason, error_type, error, traceback, worker_id,
        started_at, finished_at)
    SELECT id, attempt, CASE WHEN again THEN 'retried' ELSE 'failed' END, reason, error_type, error, traceback, worker_id,
           started_at, finished_at
    FROM owned
)
SELECT id, again, CASE WHEN again THEN delay END AS delay FROM owned

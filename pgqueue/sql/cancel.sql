-- running -> cancelled: the handler has stopped. What the worker does not know is as it was when it claimed the job.
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
WITH ended AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(errors)s::text[], %(threads)s::int[],
                         %(started_ago)s::float8[], %(ended_ago)s::float8[])
        AS e(id, lease_token, error, threads_used, started_ago, ended_ago)
), owned AS MATERIALIZED (
    SELECT j.id, j.queue, j.type, j.run_at, j.attempt + 1 AS attempt, e.error,
           coalesce(e.threads_used, j.threads_used) AS threads_used,
           coalesce(statement_timestamp() - make_interval(secs => e.started_ago),
                    least(j.started_at, statement_timestamp() - make_interval(secs => e.ended_ago))) AS started_at,
           statement_timestamp() - make_interval(secs => e.ended_ago) AS finished_at
    FROM (SELECT * FROM ended ORDER BY id) e
    CROSS JOIN LATERAL (
        SELECT j.id, j.queue, j.type, j.run_at, j.attempt, j.threads_used, j.started_at FROM pgqueue.jobs_live j
        WHERE j.id = e.id AND j.lease_token = e.lease_token FOR UPDATE
    ) j
    WHERE (SELECT set_config('lock_timeout', coalesce(%(patience)s::text, current_setting('lock_timeout')), true)) IS NOT NULL
), gone AS (
    DELETE FROM pgqueue.jobs_live j USING owned o WHERE j.id = ANY (ARRAY[o.id]) RETURNING j.*
), counted AS (
    INSERT INTO pgqueue.tallies (event, queue, type, reason, attempt, took, seconds, waited, wait_seconds, jobs)
    SELECT 'cancelled', queue, type, NULL, attempt, pgqueue.bucket(seconds), sum(seconds), pgqueue.bucket(wait_seconds),
           sum(wait_seconds), count(*)
    FROM (SELECT *, date_part('epoch', finished_at - started_at) AS seconds,
                 greatest(0, date_part('epoch', started_at - run_at)) AS wait_seconds FROM owned) o
    GROUP BY 1, 2, 3, 4, 5, 6, 8
), history AS (
    INSERT INTO pgqueue.attempts (job_id, attempt, outcome, reason, error, worker_id, started_at, finished_at)
    SELECT g.id, g.attempt + 1, 'cancelled', 'cancelled', o.error, g.worker_id, o.started_at, o.finished_at
    FROM gone g JOIN owned o USING (id)
)
INSERT INTO pgqueue.jobs_finished (id, queue, type, name, payload, status, priority, seq, run_at, thread_demand, timeout,
    max_attempts, attempt, lost, idempotency_key, tags, created_at, worker_id, lease_token, threads_used, started_at,
    cancel_requested_at, progress, finished_at, reason, error)
SELECT g.id, g.queue, g.type, g.name, g.payload, 'cancelled', g.priority, g.seq, g.run_at, g.thread_demand, g.timeout,
    g.max_attempts, g.attempt, g.lost, g.idempotency_key, g.tags, g.created_at, g.worker_id, g.lease_token, o.threads_used,
    o.started_at, g.cancel_requested_at, g.progress, o.finished_at, 'cancelled', o.error
FROM gone g JOIN owned o USING (id)
RETURNING id

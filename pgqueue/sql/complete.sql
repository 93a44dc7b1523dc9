-- running -> completed
-- Only a running job has a lease_token (a CHECK says so), so the token alone is the fence. Saying status = 'running' as well
-- would tempt the planner to the index of running jobs, which is full of finished ones while a snapshot is held.
-- The LATERAL keeps it on the primary key and locks in the order of the ids.
WITH done AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(results)s::jsonb[], %(threads)s::int[],
                         %(started_ago)s::float8[], %(ended_ago)s::float8[])
        AS d(id, lease_token, result, threads_used, started_ago, ended_ago)
), owned AS MATERIALIZED (
    SELECT d.*
    FROM (SELECT * FROM done ORDER BY id) d
    CROSS JOIN LATERAL (
        SELECT FROM pgqueue.jobs_live j WHERE j.id = d.id AND j.lease_token = d.lease_token FOR UPDATE
    ) j
), gone AS (
    DELETE FROM pgqueue.jobs_live j USING owned o WHERE j.id = o.id
    RETURNING j.*, o.result AS new_result, o.threads_used AS used, o.started_ago, o.ended_ago
)
INSERT INTO pgqueue.jobs_finished (id, queue, type, name, payload, status, priority, seq, run_at, thread_demand, timeout,
    max_attempts, attempt, lost, idempotency_key, tags, created_at, worker_id, lease_token, threads_used, started_at,
    cancel_requested_at, progress, finished_at, result)
SELECT id, queue, type, name, payload, 'completed', priority, seq, run_at, thread_demand, timeout,
    max_attempts, attempt + 1, lost, idempotency_key, tags, created_at, worker_id, lease_token, used,
    statement_timestamp() - make_interval(secs => started_ago), cancel_requested_at, progress,
    statement_timestamp() - make_interval(secs => ended_ago), new_result
FROM gone
RETURNING id

-- running -> completed
-- The effect has been done by another job: its result is this one's, too. One statement both confirms and completes.
WITH gone AS (
    DELETE FROM pgqueue.jobs_live j USING pgqueue.effects e
    WHERE j.id = %(id)s AND j.lease_token = %(lease_token)s::uuid
      AND (SELECT set_config('lock_timeout', '500ms', true)) IS NOT NULL
      AND e.key = %(key)s AND e.done_at IS NOT NULL AND e.expires_at > clock_timestamp() AND e.job_id <> j.id
    RETURNING j.*, e.result AS first_result, e.job_id AS first_id
), counted AS (
    INSERT INTO pgqueue.tallies (event, queue, type, jobs) SELECT 'completed', queue, type, 1 FROM gone
)
INSERT INTO pgqueue.jobs_finished (id, queue, type, name, payload, status, priority, seq, run_at, thread_demand, timeout,
    max_attempts, attempt, lost, idempotency_key, tags, created_at, worker_id, lease_token, threads_used, started_at,
    cancel_requested_at, progress, finished_at, result, reason)
SELECT id, queue, type, name, payload, 'completed', priority, seq, run_at, thread_demand, timeout,
    max_attempts, attempt, lost, idempotency_key, tags, created_at, worker_id, lease_token, threads_used, started_at,
    cancel_requested_at, progress, statement_timestamp(), first_result, 'duplicate of job ' || first_id
FROM gone
RETURNING id

SELECT j.id, j.queue, j.type, j.name, j.payload::text, j.status::text, j.parked, j.priority, j.seq, j.run_at, j.thread_demand,
       extract(epoch FROM j.timeout)::float8, j.max_attempts, j.attempt, j.lost, j.idempotency_key, j.tags, j.created_at,
       j.worker_id, j.lease_token, j.threads_used, j.started_at, j.cancel_requested_at, j.progress::text, j.finished_at,
       j.result::text, j.reason, j.error_type, j.error
FROM pgqueue.jobs j
WHERE j.id = %(id)s

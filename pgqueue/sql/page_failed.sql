-- The dead letter queue, newest first, from before the (finished_at, id) where the last page ended.
SELECT j.id, j.queue, j.type, j.name,
       CASE WHEN pg_column_size(j.payload) <= %(largest)s THEN j.payload::text ELSE '' END AS payload,
       j.status::text, j.parked, j.priority, j.seq, j.run_at, j.thread_demand, extract(epoch FROM j.timeout)::float8,
       j.max_attempts, j.attempt, j.lost, j.idempotency_key, j.tags, j.created_at, j.worker_id, j.lease_token, j.threads_used,
       j.started_at, j.cancel_requested_at,
       CASE WHEN pg_column_size(j.progress) <= %(largest)s THEN j.progress::text END AS progress, j.finished_at,
       CASE WHEN pg_column_size(j.result) > %(largest)s THEN '' ELSE j.result::text END AS result,
       j.reason, j.error_type, j.error
FROM pgqueue.jobs_failed j
WHERE (%(finished_at)s::timestamptz IS NULL OR (j.finished_at, j.id) < (%(finished_at)s::timestamptz, %(id)s::bigint))
  AND (%(queues)s::text[] IS NULL OR j.queue LIKE ANY (%(queues)s::text[]))
ORDER BY j.finished_at DESC, j.id DESC
LIMIT %(limit)s OFFSET %(offset)s

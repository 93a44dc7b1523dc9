-- Newest first, from before the id where the last page ended. What is large is left out: a page of many stays small.
-- The NULLs are known when it is planned, so they cost nothing.
SELECT j.id, j.queue, j.type, j.name,
       CASE WHEN pg_column_size(j.payload) <= %(largest)s THEN j.payload::text ELSE '' END AS payload,
       j.status::text, j.parked, j.priority, j.seq, j.run_at, j.thread_demand, extract(epoch FROM j.timeout)::float8,
       j.max_attempts, j.attempt, j.lost, j.idempotency_key, j.tags, j.created_at, j.worker_id, j.lease_token, j.threads_used,
       j.started_at, j.cancel_requested_at,
       CASE WHEN pg_column_size(j.progress) <= %(largest)s THEN j.progress::text END AS progress, j.finished_at,
       CASE WHEN pg_column_size(j.result) > %(largest)s THEN '' ELSE j.result::text END AS result,
       j.reason, j.error_type, j.error
FROM pgqueue.jobs j
WHERE (%(before)s::bigint IS NULL OR j.id < %(before)s::bigint)
  AND (%(statuses)s::pgqueue.status[] IS NULL OR j.status = ANY (%(statuses)s::pgqueue.status[]))
  AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
  AND (%(queues)s::text[] IS NULL OR j.queue LIKE ANY (%(queues)s::text[]))
  AND (%(type)s::text IS NULL OR j.type = %(type)s::text)
  AND (%(tag)s::text IS NULL OR %(tag)s::text = ANY (j.tags))
ORDER BY j.id DESC
LIMIT %(limit)s

-- The dead letter queue by what went wrong; numbers in messages do not make a group of their own.
SELECT md5(concat_ws(E'\x1f', j.type, j.reason, j.error_type, regexp_replace(left(j.error, 200), '[0-9]+', 'N', 'g'))) AS id,
       j.type, j.reason, j.error_type, regexp_replace(left(j.error, 200), '[0-9]+', 'N', 'g') AS message, count(*) AS jobs,
       min(j.finished_at) AS first_failed_at, max(j.finished_at) AS last_failed_at, max(j.id) AS latest_job_id
FROM pgqueue.jobs_failed j
WHERE (%(queues)s::text[] IS NULL OR j.queue LIKE ANY (%(queues)s::text[]))
GROUP BY 1, 2, 3, 4, 5
ORDER BY jobs DESC, id
LIMIT %(limit)s

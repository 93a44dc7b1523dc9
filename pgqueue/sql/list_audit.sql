SELECT a.id, a.at, a.actor, a.db_user, a.action, a.job_id, a.queue, a.reason, a.detail::text AS detail
FROM pgqueue.audit a
WHERE (%(before)s::bigint IS NULL OR a.id < %(before)s::bigint)
  AND (%(job_id)s::bigint IS NULL OR a.job_id = %(job_id)s::bigint)
ORDER BY a.id DESC
LIMIT %(limit)s

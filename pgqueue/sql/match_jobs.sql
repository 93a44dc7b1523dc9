-- The jobs that a filter matches and an action allows, oldest first.
SELECT j.id FROM pgqueue.jobs j
WHERE j.status = ANY (%(statuses)s::pgqueue.status[])
  AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
  AND (%(queues)s::text[] IS NULL OR j.queue LIKE ANY (%(queues)s::text[]))
  AND (%(type)s::text IS NULL OR j.type = %(type)s::text)
  AND (%(tag)s::text IS NULL OR %(tag)s::text = ANY (j.tags))
  AND (%(group)s::text IS NULL OR md5(concat_ws(E'\x1f', j.type, j.reason, j.error_type,
       regexp_replace(left(j.error, 200), '[0-9]+', 'N', 'g'))) = %(group)s::text)
  AND (%(ids)s::bigint[] IS NULL OR j.id = ANY (%(ids)s::bigint[]))
ORDER BY j.id
LIMIT %(limit)s

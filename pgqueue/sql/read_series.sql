-- What happened between two times, in steps; pieces are of a minute or an hour.
SELECT date_bin(make_interval(secs => %(step)s::float8), s.at, %(since)s::timestamptz) AS at, s.name, s.bucket,
       sum(s.value)::float8 AS value
FROM pgqueue.series s
WHERE s.step = %(piece)s::int AND s.at >= %(since)s::timestamptz AND s.at < %(until)s::timestamptz
  AND (%(queue)s::text IS NULL OR s.queue = %(queue)s::text)
  AND (%(queues)s::text[] IS NULL OR s.queue LIKE ANY (%(queues)s::text[]))
GROUP BY 1, 2, 3

-- Many jobs that differ only in their payloads; the ids come back in the order of the array.
INSERT INTO pgqueue.jobs (type, payload, queue, priority, run_at, thread_demand, max_attempts, timeout, tags, name)
SELECT %(type)s::text, j.payload, %(queue)s::text, %(priority)s::int,
    coalesce(%(run_at)s::timestamptz, statement_timestamp() + make_interval(secs => %(delay)s::float8), now()),
    %(thread_demand)s::int, %(max_attempts)s::int, make_interval(secs => %(timeout)s::float8), %(tags)s::text[], %(name)s::text
FROM unnest(%(payloads)s::jsonb[]) WITH ORDINALITY AS j(payload, place)
ORDER BY j.place
RETURNING id

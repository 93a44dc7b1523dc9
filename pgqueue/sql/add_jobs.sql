-- Many jobs in one statement; the ids come back in the order of the arrays.
INSERT INTO pgqueue.jobs (type, payload, queue, priority, run_at, thread_demand, max_attempts, timeout, tags, name)
SELECT j.type, j.payload, j.queue, j.priority,
    coalesce(j.run_at, statement_timestamp() + make_interval(secs => j.delay), now()), j.thread_demand, j.max_attempts,
    make_interval(secs => j.timeout), coalesce(j.tags::text[], '{}'), j.name
FROM unnest(%(types)s::text[], %(payloads)s::jsonb[], %(queues)s::text[], %(priorities)s::int[], %(delays)s::float8[],
            %(run_ats)s::timestamptz[], %(thread_demands)s::int[], %(max_attempts)s::int[], %(timeouts)s::float8[],
            %(tags)s::text[], %(names)s::text[]) WITH ORDINALITY
    AS j(type, payload, queue, priority, delay, run_at, thread_demand, max_attempts, timeout, tags, name, place)
ORDER BY j.place
RETURNING id

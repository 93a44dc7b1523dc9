SELECT id, inserted FROM pgqueue.add_job(
    type => %(type)s::text, payload => %(payload)s::jsonb, queue => %(queue)s::text, priority => %(priority)s::int,
    delay => make_interval(secs => %(delay)s::float8), run_at => %(run_at)s::timestamptz, thread_demand => %(thread_demand)s::int,
    max_attempts => %(max_attempts)s::int, timeout => make_interval(secs => %(timeout)s::float8),
    idempotency_key => %(idempotency_key)s::text, key_ttl => make_interval(secs => %(key_ttl)s::float8),
    tags => %(tags)s::text[], name => %(name)s::text)

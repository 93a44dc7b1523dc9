SELECT id, inserted FROM pgqueue.add_job(
    type => %(type)s, payload => %(payload)s::jsonb, queue => %(queue)s, priority => %(priority)s,
    delay => make_interval(secs => %(delay)s::float8), run_at => %(run_at)s, thread_demand => %(thread_demand)s,
    max_attempts => %(max_attempts)s, timeout => make_interval(secs => %(timeout)s::float8),
    idempotency_key => %(idempotency_key)s, key_ttl => make_interval(secs => %(key_ttl)s::float8),
    tags => %(tags)s::text[], name => %(name)s)

-- Again, if the answer was lost: the row is its own, unless it has retired.
INSERT INTO pgqueue.workers AS w (id, name, host, pid, version, queues, types, threads, listening, expires_at)
VALUES (%(id)s, %(name)s, %(host)s, %(pid)s, %(version)s, %(queues)s, %(types)s, %(threads)s, %(listening)s,
        clock_timestamp() + make_interval(secs => %(lease_timeout)s))
ON CONFLICT (id) DO UPDATE SET heartbeat_at = clock_timestamp(), expires_at = excluded.expires_at WHERE w.stopped_at IS NULL

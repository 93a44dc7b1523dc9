INSERT INTO pgqueue.workers (id, name, host, pid, version, queues, types, threads, listening, expires_at)
VALUES (%(id)s, %(name)s, %(host)s, %(pid)s, %(version)s, %(queues)s, %(types)s, %(threads)s, %(listening)s,
        clock_timestamp() + make_interval(secs => %(lease_timeout)s))

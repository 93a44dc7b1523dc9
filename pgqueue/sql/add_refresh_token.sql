INSERT INTO pgqueue.refresh_tokens (hash, family, user_id, expires_at)
VALUES (%(hash)s, %(family)s, %(user_id)s, clock_timestamp() + make_interval(secs => %(ttl)s::float8))

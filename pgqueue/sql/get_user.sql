SELECT u.id, u.name, u.password_hash, u.scopes, u.queues FROM pgqueue.users u WHERE lower(u.name) = lower(%(name)s::text)

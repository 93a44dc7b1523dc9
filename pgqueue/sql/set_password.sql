UPDATE pgqueue.users u SET password_hash = %(password_hash)s WHERE lower(u.name) = lower(%(name)s::text) RETURNING u.id, u.name

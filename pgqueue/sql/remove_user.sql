-- With its sessions.
DELETE FROM pgqueue.users u WHERE lower(u.name) = lower(%(name)s::text) RETURNING u.name

INSERT INTO pgqueue.users (name, password_hash, scopes, queues)
VALUES (%(name)s, %(password_hash)s, %(scopes)s::text[], %(queues)s::text[])
ON CONFLICT (lower(name)) DO NOTHING
RETURNING id

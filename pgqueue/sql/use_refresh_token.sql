-- Two who bring the same token wait for each other here, and the second sees that it was used.
SELECT t.family, t.used_at IS NOT NULL, t.expires_at <= clock_timestamp(), u.id, u.name, u.scopes, u.queues
FROM pgqueue.refresh_tokens t JOIN pgqueue.users u ON u.id = t.user_id
WHERE t.hash = %(hash)s FOR UPDATE OF t

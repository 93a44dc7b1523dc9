SELECT u.name, u.scopes, u.queues, u.created_at, (
    SELECT count(DISTINCT t.family) FROM pgqueue.refresh_tokens t
    WHERE t.user_id = u.id AND t.used_at IS NULL AND t.expires_at > statement_timestamp()) AS sessions
FROM pgqueue.users u
ORDER BY lower(u.name)
LIMIT 10000

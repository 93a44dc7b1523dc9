-- All but the newest sessions of a user, so that one more fits.
DELETE FROM pgqueue.refresh_tokens t
WHERE t.user_id = %(user_id)s AND t.family NOT IN (
    SELECT s.family FROM pgqueue.refresh_tokens s
    WHERE s.user_id = %(user_id)s AND s.used_at IS NULL AND s.expires_at > statement_timestamp()
    GROUP BY s.family ORDER BY max(s.created_at) DESC, s.family LIMIT %(keep)s
)

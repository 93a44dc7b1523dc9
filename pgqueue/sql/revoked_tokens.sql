SELECT t.jti, extract(epoch FROM t.revoked_at)::float8 AS revoked_at FROM pgqueue.revoked_tokens t
WHERE t.expires_at > statement_timestamp()

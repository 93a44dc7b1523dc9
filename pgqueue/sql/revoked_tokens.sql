SELECT t.jti FROM pgqueue.revoked_tokens t WHERE t.expires_at > statement_timestamp()

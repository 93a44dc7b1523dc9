-- Those that were made here and have not expired. The audit has no index for them, so only its newest part is looked at.
SELECT a.detail ->> 'jti' AS jti, a.detail ->> 'sub' AS subject, a.detail ->> 'scope' AS scope, a.actor, a.at,
       to_timestamp((a.detail ->> 'exp')::float8) AS expires_at, r.jti IS NOT NULL AS revoked
FROM (SELECT * FROM pgqueue.audit ORDER BY id DESC LIMIT 100000) a
LEFT JOIN pgqueue.revoked_tokens r ON r.jti = a.detail ->> 'jti'
WHERE a.action = 'create_token' AND to_timestamp((a.detail ->> 'exp')::float8) > statement_timestamp()
ORDER BY a.id DESC
LIMIT %(limit)s

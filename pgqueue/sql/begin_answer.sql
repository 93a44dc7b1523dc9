-- Waits for whoever has the same key in an open transaction; after that the row is there, or free to take.
INSERT INTO pgqueue.http_answers AS a (subject, route, key, fingerprint, expires_at)
VALUES (%(subject)s, %(route)s, %(key)s, %(fingerprint)s, clock_timestamp() + interval '24 hours')
ON CONFLICT (subject, route, key) DO UPDATE
    SET fingerprint = excluded.fingerprint, expires_at = excluded.expires_at, status = NULL, body = NULL, location = NULL
    WHERE a.expires_at <= clock_timestamp()
RETURNING 1

-- In the transaction that completes the job, unless another job has taken the effect over.
-- ON CONFLICT finds the row without reading pages of indexes: handlers that are serializable do not meet there.
INSERT INTO pgqueue.effects AS e (key, job_id, done_at, result, expires_at)
VALUES (%(key)s, %(id)s, clock_timestamp(), %(result)s::jsonb, clock_timestamp() + make_interval(secs => %(ttl)s))
ON CONFLICT (key) DO UPDATE SET done_at = excluded.done_at, result = excluded.result, expires_at = excluded.expires_at
    WHERE e.job_id = excluded.job_id
RETURNING e.key

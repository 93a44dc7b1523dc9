-- In the transaction that completes the job.
UPDATE pgqueue.effects SET done_at = clock_timestamp(), result = %(result)s::jsonb,
    expires_at = clock_timestamp() + make_interval(secs => %(ttl)s)
WHERE key = %(key)s AND job_id = %(id)s

-- The leases that this worker has had for a while. One that it does not know came from a claim whose answer was lost.
SELECT id, lease_token::text FROM pgqueue.jobs_live
WHERE status = 'running' AND worker_id = %(worker_id)s
  -- What was claimed in the future was claimed before the clock was set back.
  AND (started_at < clock_timestamp() - make_interval(secs => %(age)s) OR started_at > clock_timestamp() + interval '1 second')

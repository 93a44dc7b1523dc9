-- The running jobs of this worker that somebody wants stopped.
SELECT id, lease_token::text FROM pgqueue.jobs_live
WHERE worker_id = %(worker_id)s AND cancel_requested_at IS NOT NULL AND status = 'running'

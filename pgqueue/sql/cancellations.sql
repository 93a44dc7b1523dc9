-- The running jobs of this worker that somebody wants stopped. They are those with a lease: status = 'running' would tempt
-- the planner to the index of running jobs, where all that this worker ever ran may still stand.
SELECT id, lease_token::text FROM pgqueue.jobs_live
WHERE worker_id = %(worker_id)s AND cancel_requested_at IS NOT NULL AND lease_token IS NOT NULL

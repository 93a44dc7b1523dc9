-- Kept only while the lease stands; the lock keeps the job from being taken in between.
INSERT INTO pgqueue.steps (job_id, name, result)
SELECT j.id, %(name)s, %(result)s::jsonb FROM pgqueue.jobs_live j
WHERE j.id = %(id)s AND j.lease_token = %(lease_token)s
  AND (SELECT set_config('lock_timeout', '500ms', true)) IS NOT NULL FOR NO KEY UPDATE
ON CONFLICT (job_id, name) DO UPDATE SET result = excluded.result, created_at = excluded.created_at
RETURNING job_id

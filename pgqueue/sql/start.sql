-- A suspect says that it runs now, so that only it is charged if the worker dies.
UPDATE pgqueue.jobs_live SET threads_used = %(threads)s, started_at = statement_timestamp()
FROM (SELECT set_config('lock_timeout', '500ms', true)) impatient
WHERE id = %(id)s AND lease_token = %(lease_token)s AND status = 'running'
RETURNING id

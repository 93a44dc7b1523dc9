-- A courtesy: nobody waits for a row that somebody holds.
UPDATE pgqueue.jobs_live SET progress = %(progress)s
FROM (SELECT set_config('lock_timeout', '100ms', true)) impatient
WHERE id = %(id)s AND lease_token = %(lease_token)s AND status = 'running'
RETURNING id

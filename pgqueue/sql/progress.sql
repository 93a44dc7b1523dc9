UPDATE pgqueue.jobs_live SET progress = %(progress)s
WHERE id = %(id)s AND lease_token = %(lease_token)s AND status = 'running'
RETURNING id

SELECT name, result::text FROM pgqueue.steps WHERE job_id = %(id)s

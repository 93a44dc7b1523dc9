SELECT pgqueue.edit_job(%(id)s, %(changes)s::jsonb, %(reason)s)

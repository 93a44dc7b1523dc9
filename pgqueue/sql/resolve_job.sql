SELECT pgqueue.resolve_job(%(id)s, %(outcome)s, %(reason)s, %(result)s::jsonb)

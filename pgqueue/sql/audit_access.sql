SELECT pgqueue.audit_access(%(action)s, %(detail)s::jsonb, %(reason)s)

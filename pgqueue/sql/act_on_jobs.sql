SELECT id, status, problem FROM pgqueue.act_on_jobs(%(ids)s::bigint[], %(action)s, %(reason)s)

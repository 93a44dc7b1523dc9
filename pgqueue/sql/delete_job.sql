SELECT pgqueue.delete_job(%(id)s, %(reason)s)

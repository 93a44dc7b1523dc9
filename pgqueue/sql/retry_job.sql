SELECT pgqueue.retry_job(%(id)s, %(reason)s)

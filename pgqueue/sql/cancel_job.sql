SELECT pgqueue.cancel_job(%(id)s, %(reason)s)

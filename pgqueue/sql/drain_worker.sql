SELECT pgqueue.drain_worker(%(id)s, %(reason)s)

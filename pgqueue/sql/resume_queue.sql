SELECT pgqueue.resume_queue(%(queue)s, %(reason)s)

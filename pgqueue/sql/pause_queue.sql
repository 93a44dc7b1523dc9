SELECT pgqueue.pause_queue(%(queue)s, %(reason)s)

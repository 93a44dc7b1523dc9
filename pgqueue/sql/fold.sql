SELECT pgqueue.fold(%(wait)s::boolean)

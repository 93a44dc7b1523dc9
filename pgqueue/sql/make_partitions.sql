SELECT pgqueue.make_partitions(%(ahead)s)

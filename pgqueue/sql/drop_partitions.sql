SELECT pgqueue.drop_partitions(make_interval(days => %(days)s))

SELECT pgqueue.drop_partitions(greatest(make_interval(secs => %(days)s * 86400.0), interval '1 day'))

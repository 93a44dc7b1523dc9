SELECT pgqueue.wake(%(queues)s::text[], %(types)s::text[], %(demands)s::int[])

-- A commit that hangs (its standby is away) holds the lock that all NOTIFYs of the server need: nobody waits for it for long.
SELECT pgqueue.wake(%(queues)s::text[], %(types)s::text[], %(demands)s::int[])
FROM (SELECT set_config('lock_timeout', '300ms', true)) impatient

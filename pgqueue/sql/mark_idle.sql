UPDATE pgqueue.workers SET idle_since = clock_timestamp()
FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
WHERE id = %(id)s AND idle_since IS NULL

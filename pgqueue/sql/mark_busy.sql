UPDATE pgqueue.workers SET idle_since = NULL, last_used_at = clock_timestamp()
FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
WHERE id = %(id)s

UPDATE pgqueue.workers SET last_used_at = clock_timestamp()
FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
WHERE id = %(id)s

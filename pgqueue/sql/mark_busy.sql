UPDATE pgqueue.workers SET idle_since = NULL, last_used_at = clock_timestamp() WHERE id = %(id)s

UPDATE pgqueue.workers SET idle_since = clock_timestamp() WHERE id = %(id)s AND idle_since IS NULL

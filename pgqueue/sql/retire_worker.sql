UPDATE pgqueue.workers
SET stopped_at = clock_timestamp(), expires_at = least(expires_at, clock_timestamp()), state = 'unavailable',
    idle_since = NULL, listening = false, threads_used = 0, completed = %(completed)s, failed = %(failed)s
WHERE id = %(id)s AND stopped_at IS NULL

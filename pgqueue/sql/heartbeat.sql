-- Renews every lease of this worker with one write. Never touches a job's row.
UPDATE pgqueue.workers w
SET heartbeat_at = clock_timestamp(), expires_at = clock_timestamp() + make_interval(secs => %(lease_timeout)s),
    threads_used = %(threads_used)s, completed = %(completed)s, failed = %(failed)s, listening = %(listening)s,
    -- Else who was used before the clock was set back would not be woken until it is there again.
    last_used_at = least(w.last_used_at, clock_timestamp()),
    state = CASE WHEN %(threads_used)s >= w.threads THEN 'busy' ELSE 'available' END,
    draining = w.draining OR EXISTS (SELECT FROM pgqueue.drains d WHERE d.worker_id = w.id)
-- Whoever holds the row: a beat that nobody waits for any more must not stand in line for it, nor the next one behind it.
FROM (SELECT set_config('synchronous_commit', 'off', true), set_config('lock_timeout', '500ms', true)) undurable
WHERE w.id = %(id)s AND w.stopped_at IS NULL
RETURNING w.draining,
    -- Asking is the cure, too: PostgreSQL moves the tail of a notification queue that was full only when somebody asks.
    pg_notification_queue_usage() AS notify_queue,
    w.idle_since IS NOT NULL AS idle

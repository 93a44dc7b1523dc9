SELECT w.id, w.name, w.host, w.pid, w.version, w.state, w.draining, w.queues, w.types, w.threads, w.threads_used, w.completed,
       w.failed, w.started_at, w.heartbeat_at, w.expires_at, w.stopped_at
FROM pgqueue.workers w
WHERE %(all)s::boolean OR w.stopped_at IS NULL AND w.expires_at > statement_timestamp()
ORDER BY w.started_at DESC, w.id
LIMIT %(limit)s

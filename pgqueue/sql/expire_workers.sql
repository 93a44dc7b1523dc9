-- A worker whose heartbeat stopped is shown as unavailable, and nobody wakes it.
UPDATE pgqueue.workers SET state = 'unavailable', idle_since = NULL, threads_used = 0
WHERE state <> 'unavailable' AND expires_at <= statement_timestamp()
RETURNING id, name

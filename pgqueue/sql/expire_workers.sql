-- A worker whose heartbeat stopped is shown as unavailable, and nobody wakes it.
-- A heartbeat in the future says that the clock was set back: from now on the lease is as long as it was meant to be. Else
-- the jobs of a worker that died before would wait until the clock is there again.
WITH ahead AS (
    UPDATE pgqueue.workers
    SET heartbeat_at = statement_timestamp(), expires_at = statement_timestamp() + (expires_at - heartbeat_at)
    WHERE heartbeat_at > statement_timestamp() + interval '1 second'
)
UPDATE pgqueue.workers SET state = 'unavailable', idle_since = NULL, threads_used = 0
WHERE state <> 'unavailable' AND expires_at <= statement_timestamp()
RETURNING id, name

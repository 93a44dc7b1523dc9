-- A worker whose heartbeat stopped is shown as unavailable, and nobody wakes it.
-- A heartbeat in the future says that the clock was set back: from now on the lease is as long as it was meant to be. Else
-- the jobs of a worker that died before would wait until the clock is there again.
-- A row that somebody holds is left for the next time: rescue, which comes after this, does not need it.
WITH wrong AS MATERIALIZED (
    SELECT w.id, w.heartbeat_at > statement_timestamp() + interval '1 second' AS ahead
    FROM pgqueue.workers w
    WHERE w.heartbeat_at > statement_timestamp() + interval '1 second'
       OR w.state <> 'unavailable' AND w.expires_at <= statement_timestamp()
    FOR NO KEY UPDATE SKIP LOCKED
), ahead AS (
    UPDATE pgqueue.workers w
    SET heartbeat_at = statement_timestamp(), expires_at = statement_timestamp() + (w.expires_at - w.heartbeat_at)
    FROM wrong o WHERE w.id = o.id AND o.ahead
), expired AS (
    UPDATE pgqueue.workers w SET state = 'unavailable', idle_since = NULL, threads_used = 0
    FROM wrong o WHERE w.id = o.id AND NOT o.ahead
), early AS (
    -- What an attempt put off (nothing else that waits has begun) is as far off as it was meant to be. No index has these
    -- jobs, so they are looked for only when it is known that the clock was set back.
    UPDATE pgqueue.jobs_live j
    SET run_at = statement_timestamp() + (j.run_at - j.started_at), started_at = statement_timestamp()
    WHERE (%(seen)s::timestamptz > statement_timestamp() OR EXISTS (SELECT FROM wrong o WHERE o.ahead))
      AND j.id IN (SELECT s.id FROM pgqueue.jobs_live s
                   WHERE s.status = 'scheduled' AND s.started_at > statement_timestamp() + interval '1 second'
                   FOR UPDATE SKIP LOCKED)
)
SELECT statement_timestamp()

-- The workers that have not ended.
SELECT w.name, w.threads, w.threads_used,
       CASE WHEN w.expires_at <= statement_timestamp() OR w.draining THEN 'unavailable'
            WHEN w.threads_used >= w.threads THEN 'busy' ELSE 'available' END AS state
FROM pgqueue.workers w
WHERE w.stopped_at IS NULL AND w.expires_at > statement_timestamp() - interval '5 minutes'
ORDER BY w.started_at DESC
LIMIT 1000

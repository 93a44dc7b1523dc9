-- How many wait and run, and since when the first has been ready, by queue. The lanes are found by jumping along the index;
-- the first of a lane became ready first.
WITH RECURSIVE lane AS (
    (SELECT j.queue, j.priority, j.run_at FROM pgqueue.jobs_live j WHERE j.status = 'pending' AND NOT j.parked
     ORDER BY j.queue, j.priority DESC, j.seq LIMIT 1)
    UNION ALL
    SELECT n.queue, n.priority, n.run_at
    FROM lane l
    CROSS JOIN LATERAL (
        (SELECT j.queue, j.priority, j.run_at FROM pgqueue.jobs_live j
         WHERE j.status = 'pending' AND NOT j.parked AND j.queue = l.queue AND j.priority < l.priority
         ORDER BY j.priority DESC, j.seq LIMIT 1)
        UNION ALL
        (SELECT j.queue, j.priority, j.run_at FROM pgqueue.jobs_live j
         WHERE j.status = 'pending' AND NOT j.parked AND j.queue > l.queue
         ORDER BY j.queue, j.priority DESC, j.seq LIMIT 1)
        LIMIT 1
    ) n
), oldest AS (
    SELECT l.queue, min(l.run_at) AS run_at FROM lane l GROUP BY 1
), live AS (
    SELECT j.queue, count(*) FILTER (WHERE j.status = 'pending') AS ready,
           count(*) FILTER (WHERE j.status = 'scheduled' AND j.attempt = 0) AS scheduled,
           count(*) FILTER (WHERE j.status = 'scheduled' AND j.attempt > 0) AS retrying,
           count(*) FILTER (WHERE j.status = 'running') AS running
    FROM pgqueue.jobs_live j GROUP BY 1
), dead AS (
    SELECT j.queue, count(*) AS dead FROM pgqueue.jobs_failed j GROUP BY 1
)
SELECT queue, coalesce(l.ready, 0), coalesce(l.scheduled, 0), coalesce(l.retrying, 0), coalesce(l.running, 0),
       coalesce(d.dead, 0), greatest(0, extract(epoch FROM statement_timestamp() - o.run_at))::float8, q.paused_at IS NOT NULL
FROM live l
FULL JOIN dead d USING (queue)
FULL JOIN (SELECT q.name AS queue, q.paused_at FROM pgqueue.queues q) q USING (queue)
LEFT JOIN oldest o USING (queue)
ORDER BY queue

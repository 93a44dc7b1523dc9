-- Exact up to the limit: nobody waits for the count of millions.
-- A branch for each index, kept on it by its ORDER BY. Those of other statuses are gone when it is planned.
SELECT count(*) FROM (
    (SELECT FROM pgqueue.jobs_live j
     WHERE %(status)s::text = 'pending' AND j.status = 'pending' AND NOT j.parked
       AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
     ORDER BY j.queue, j.priority DESC, j.seq LIMIT %(limit)s)
    UNION ALL
    (SELECT FROM pgqueue.jobs_live j
     WHERE %(status)s::text = 'pending' AND j.status = 'pending' AND j.parked
       AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
     ORDER BY j.queue, j.type, j.priority DESC, j.seq LIMIT %(limit)s)
    UNION ALL
    (SELECT FROM pgqueue.jobs_live j
     WHERE %(status)s::text = 'scheduled' AND j.status = 'scheduled' AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
     ORDER BY j.run_at, j.id LIMIT %(limit)s)
    UNION ALL
    (SELECT FROM pgqueue.jobs_live j
     WHERE %(status)s::text = 'running' AND j.status = 'running' AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
     ORDER BY j.worker_id LIMIT %(limit)s)
    UNION ALL
    (SELECT FROM pgqueue.jobs j
     WHERE %(status)s::text IN ('completed', 'failed', 'cancelled') AND j.status = %(status)s::pgqueue.status
       AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
     LIMIT %(limit)s)
    LIMIT %(limit)s
) counted

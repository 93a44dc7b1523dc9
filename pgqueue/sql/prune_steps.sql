-- Steps as old as the history that is dropped, unless their job still waits or runs, or can be retried.
-- Each job is looked up by its id: as a join, all history might be scanned for a few old steps.
DELETE FROM pgqueue.steps s
WHERE s.ctid = ANY (ARRAY(
    SELECT o.ctid FROM pgqueue.steps o
    WHERE o.created_at < statement_timestamp() - make_interval(secs => %(days)s * 86400.0)
      AND (SELECT true FROM pgqueue.jobs_live j WHERE j.id = o.job_id LIMIT 1) IS NULL
      AND (SELECT true FROM pgqueue.jobs_failed j WHERE j.id = o.job_id LIMIT 1) IS NULL
      AND (SELECT true FROM pgqueue.jobs_finished j WHERE j.id = o.job_id AND j.status = 'cancelled' LIMIT 1) IS NULL
    FOR UPDATE SKIP LOCKED
))

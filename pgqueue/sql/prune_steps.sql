-- Steps as old as the history that is dropped, unless their job still waits or runs, or can be retried.
DELETE FROM pgqueue.steps s
WHERE (s.job_id, s.name) IN (
    SELECT o.job_id, o.name FROM pgqueue.steps o
    WHERE o.created_at < statement_timestamp() - make_interval(secs => %(days)s * 86400.0)
      AND NOT EXISTS (SELECT FROM pgqueue.jobs_live j WHERE j.id = o.job_id)
      AND NOT EXISTS (SELECT FROM pgqueue.jobs_failed j WHERE j.id = o.job_id)
      AND NOT EXISTS (SELECT FROM pgqueue.jobs_finished j WHERE j.id = o.job_id AND j.status = 'cancelled')
    FOR UPDATE SKIP LOCKED
)

-- Steps as old as the history that is dropped, unless their job still waits, runs, or lies in the dead letter queue.
DELETE FROM pgqueue.steps s
WHERE s.created_at < statement_timestamp() - make_interval(secs => %(days)s * 86400.0)
  AND NOT EXISTS (SELECT FROM pgqueue.jobs_live j WHERE j.id = s.job_id)
  AND NOT EXISTS (SELECT FROM pgqueue.jobs_failed j WHERE j.id = s.job_id)

SELECT a.id, a.job_id, a.attempt, a.outcome, a.reason, a.error_type, a.error, a.traceback, a.worker_id, a.started_at,
       a.finished_at
FROM pgqueue.attempts a
WHERE a.job_id = %(id)s
ORDER BY a.id

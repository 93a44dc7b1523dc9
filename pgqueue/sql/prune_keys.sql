-- Keys past their time whose job has finished. A key of an unfinished job stays, however old.
DELETE FROM pgqueue.idempotency_keys k
WHERE k.key IN (
    SELECT e.key FROM pgqueue.idempotency_keys e
    WHERE e.expires_at <= statement_timestamp() AND NOT EXISTS (SELECT FROM pgqueue.jobs_live j WHERE j.id = e.job_id)
    ORDER BY e.expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)

-- Keys past their time whose job has finished. A key of an unfinished job stays, however old.
-- By their ctid: else the whole table might be scanned for each batch; and a key that was taken anew since this statement
-- began, by a job that it cannot see, has another.
DELETE FROM pgqueue.idempotency_keys k
WHERE k.ctid = ANY (ARRAY(
    SELECT e.ctid FROM pgqueue.idempotency_keys e
    WHERE e.expires_at <= statement_timestamp() AND NOT EXISTS (SELECT FROM pgqueue.jobs_live j WHERE j.id = e.job_id)
    ORDER BY e.expires_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
))

-- Effects that are done and past their time. One that is in doubt stays until somebody resolves it.
DELETE FROM pgqueue.effects e
WHERE e.ctid = ANY (ARRAY(
    SELECT d.ctid FROM pgqueue.effects d WHERE d.expires_at <= statement_timestamp() AND d.done_at IS NOT NULL
    ORDER BY d.expires_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
))

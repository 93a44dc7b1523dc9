-- Rows of worker processes that ended more than a day ago. Rescue does not need them.
DELETE FROM pgqueue.workers w
WHERE w.id IN (
    SELECT o.id FROM pgqueue.workers o WHERE o.expires_at < statement_timestamp() - interval '1 day' FOR UPDATE SKIP LOCKED
)

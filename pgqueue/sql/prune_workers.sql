-- Rows of worker processes that ended more than a day ago. Rescue does not need them.
DELETE FROM pgqueue.workers WHERE expires_at < statement_timestamp() - interval '1 day'

-- Whether every enqueuer that may have seen this worker busy has ended. Ask after mark_idle has committed.
SELECT pg_try_advisory_xact_lock(1885827429, 1)

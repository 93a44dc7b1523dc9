-- Minutes of a day, hours for as long as the history.
DELETE FROM pgqueue.series s
WHERE (s.step, s.at, s.queue, s.name, s.bucket) IN (
    SELECT o.step, o.at, o.queue, o.name, o.bucket FROM pgqueue.series o
    WHERE o.step = 60 AND o.at < statement_timestamp() - interval '1 day 1 hour'
       OR o.step = 3600 AND o.at < statement_timestamp() - make_interval(secs => %(days)s * 86400.0)
    FOR UPDATE SKIP LOCKED
)

-- Minutes of a day, hours for as long as the history.
DELETE FROM pgqueue.series s
WHERE s.step = 60 AND s.at < statement_timestamp() - interval '1 day 1 hour'
   OR s.step = 3600 AND s.at < statement_timestamp() - make_interval(secs => %(days)s * 86400.0)

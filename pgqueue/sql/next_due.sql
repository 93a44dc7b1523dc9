-- seconds until the next scheduled job is due; NULL: there is none
SELECT extract(epoch FROM j.run_at - clock_timestamp())::float8 AS seconds
FROM pgqueue.jobs_live j
WHERE j.status = 'scheduled' AND j.run_at >= %(floor)s
ORDER BY j.run_at, j.id
LIMIT 1

-- What an idle worker asks once a second, in one statement: when is the next scheduled job due, which of its jobs are to be
-- cancelled, and is anything parked.
SELECT (SELECT extract(epoch FROM j.run_at - clock_timestamp())::float8 FROM pgqueue.jobs_live j
        WHERE j.status = 'scheduled' AND j.run_at >= %(floor)s ORDER BY j.run_at, j.id LIMIT 1) AS due_in,
       ARRAY(SELECT j.id FROM pgqueue.jobs_live j
             WHERE j.worker_id = %(worker_id)s AND j.cancel_requested_at IS NOT NULL AND j.lease_token IS NOT NULL) AS cancelled,
       -- Not EXISTS, which drops the ORDER BY that keeps it on the index.
       (SELECT true FROM pgqueue.jobs_live j WHERE j.status = 'pending' AND j.parked
        ORDER BY j.queue, j.type, j.priority DESC, j.seq LIMIT 1) IS NOT NULL AS parked

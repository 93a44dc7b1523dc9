-- Exact up to the limit: nobody waits for the count of millions.
SELECT count(*) FROM (
    SELECT FROM pgqueue.jobs j
    WHERE j.status = %(status)s::pgqueue.status AND (%(queue)s::text IS NULL OR j.queue = %(queue)s::text)
    LIMIT %(limit)s
) counted

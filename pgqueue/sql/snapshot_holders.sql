-- The number after the latest transaction that has ended and, for the worker that has been here for longest (NULL: for
-- anybody), what keeps vacuum from removing dead rows, and how long it has been there at most.
SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS upcoming, h.kind, h.name, h.transactions,
       extract(epoch FROM clock_timestamp() - h.since)::float8 AS at_most, h.what, h.remedy
FROM (SELECT %(worker_id)s::uuid IS NULL OR %(worker_id)s::uuid = (
          SELECT w.id FROM pgqueue.workers w WHERE w.expires_at > statement_timestamp() AND w.stopped_at IS NULL
          ORDER BY w.started_at, w.id LIMIT 1) AS speaks) me
LEFT JOIN LATERAL (SELECT * FROM pgqueue.snapshot_holders() WHERE me.speaks) h ON true
ORDER BY h.transactions DESC NULLS LAST

-- What workers have described, and what live workers know beside it.
SELECT coalesce(t.name, w.name) AS name, t.queue, t.schema::text AS schema, coalesce(w.workers, 0) AS workers
FROM pgqueue.types t
FULL JOIN (
    SELECT k.name, count(*) AS workers FROM pgqueue.workers w CROSS JOIN LATERAL unnest(w.types) AS k(name)
    WHERE w.expires_at > statement_timestamp() AND w.stopped_at IS NULL
    GROUP BY k.name
) w ON w.name = t.name
ORDER BY 1

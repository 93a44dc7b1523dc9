-- Which of these leases' rows somebody else holds, and who that is; it waits for nobody.
-- A row names one transaction that holds it; if several do, it names none of them.
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
SELECT o.id, CASE
    WHEN a.pid IS NOT NULL THEN format('session %%s (%%s): end its transaction, or end it: SELECT pg_terminate_backend(%%s)',
        a.pid, concat_ws(', ', 'user ' || a.usename, nullif(a.application_name, '')), a.pid)
    WHEN l.granted THEN 'a prepared transaction: decide it, see pg_prepared_xacts'
    ELSE 'somebody: see pg_locks' END
FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) AS o(id, lease_token)
JOIN pgqueue.jobs_live j ON j.id = ANY (ARRAY[o.id]) AND j.lease_token = o.lease_token
LEFT JOIN LATERAL (
    SELECT true AS free FROM pgqueue.jobs_live f WHERE f.id = j.id AND f.lease_token = o.lease_token FOR UPDATE SKIP LOCKED
) f ON true
LEFT JOIN pg_locks l ON l.locktype = 'transactionid' AND l.transactionid = j.xmax AND l.granted AND l.mode = 'ExclusiveLock'
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE f.free IS NULL AND (SELECT set_config('lock_timeout', %(patience)s::text, true)) IS NOT NULL

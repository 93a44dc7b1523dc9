-- Totals for metrics and series for charts, from the tallies that statements leave; and what keeps vacuum from its work.
-- A statement ends with a semicolon before an empty line; each is executed on its own.

CREATE TABLE pgqueue.totals (
    name   text    NOT NULL,
    queue  text    NOT NULL,
    type   text    NOT NULL,
    label  text    NOT NULL,
    bucket integer NOT NULL,
    value  float8  NOT NULL,
    PRIMARY KEY (name, queue, type, label, bucket)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0);

COMMENT ON TABLE pgqueue.totals IS 'How often what has happened since the beginning.';

CREATE TABLE pgqueue.series (
    step   integer     NOT NULL,
    at     timestamptz NOT NULL,
    queue  text        NOT NULL,
    name   text        NOT NULL,
    bucket integer     NOT NULL,
    value  float8      NOT NULL,
    PRIMARY KEY (step, at, queue, name, bucket)
) WITH (fillfactor = 50);

COMMENT ON TABLE pgqueue.series IS 'How often what happened in which minute (step 60) and hour (step 3600).';

-- Moves the tallies to totals and series, and says how many there were. With `wait`, what was committed before the call
-- is in totals after it. Types that no worker has described, and queues beyond the first 200, count as (other): names
-- come from strangers, and totals are kept for ever.
CREATE FUNCTION pgqueue.fold(wait boolean DEFAULT true) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' SET timezone = 'UTC' AS $$
DECLARE
    folded bigint;
BEGIN
    IF wait THEN
        PERFORM FROM pgqueue.chores c WHERE c.name = 'fold' FOR UPDATE;
    ELSE
        PERFORM FROM pgqueue.chores c WHERE c.name = 'fold' FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN 0;
        END IF;
    END IF;
    WITH gone AS (
        DELETE FROM pgqueue.tallies RETURNING *
    ), known AS MATERIALIZED (
        SELECT DISTINCT t.queue FROM pgqueue.totals t WHERE t.name = 'enqueued'
    ), fresh AS (
        SELECT d.queue, row_number() OVER (ORDER BY d.queue) AS place
        FROM (SELECT DISTINCT g.queue FROM gone g) d WHERE d.queue NOT IN (SELECT k.queue FROM known k)
    ), told AS MATERIALIZED (
        SELECT k.queue FROM known k
        UNION ALL
        SELECT f.queue FROM fresh f WHERE f.place <= 200 - (SELECT count(*) FROM known)
    ), tally AS MATERIALIZED (
        SELECT g.at, g.event, coalesce(q.queue, '(other)') AS queue, coalesce(t.name, '(other)') AS type, g.reason, g.attempt,
               g.took, g.seconds, g.waited, g.wait_seconds, g.jobs,
               CASE WHEN g.event = 'failed' AND g.reason IN ('timeout', 'worker_lost') THEN 'timeout'
                    WHEN g.event IN ('completed', 'failed', 'cancelled') THEN g.event END AS finished
        FROM gone g LEFT JOIN told q ON q.queue = g.queue LEFT JOIN pgqueue.types t ON t.name = g.type
    ), total AS (
        INSERT INTO pgqueue.totals AS t (name, queue, type, label, bucket, value)
        SELECT v.name, v.queue, v.type, v.label, v.bucket, sum(v.value)
        FROM tally l CROSS JOIN LATERAL (VALUES
            ('enqueued', l.queue, l.type, '', 0, CASE WHEN l.event = 'enqueued' THEN l.jobs END),
            ('finished', l.queue, l.type, l.finished, 0, CASE WHEN l.finished IS NOT NULL THEN l.jobs END),
            ('dead', l.queue, '', '', 0, CASE WHEN l.event = 'failed' THEN l.jobs END),
            ('lost', l.queue, '', '', 0, CASE WHEN l.reason = 'worker_lost' THEN l.jobs END),
            ('ended', l.queue, l.type, l.event, 0, CASE WHEN l.event <> 'exhausted' AND l.attempt IS NOT NULL THEN l.jobs END),
            ('retried', l.queue, l.type, l.reason, 0, CASE WHEN l.event = 'retried' THEN l.jobs END),
            ('took', l.queue, l.type, '', l.took, CASE WHEN l.took IS NOT NULL THEN l.jobs END),
            ('took_seconds', l.queue, l.type, '', 0, l.seconds),
            ('waited', l.queue, '', '', l.waited, CASE WHEN l.waited IS NOT NULL THEN l.jobs END),
            ('waited_seconds', l.queue, '', '', 0, l.wait_seconds),
            ('attempts', l.queue, '', '', least(l.attempt, 1000), CASE WHEN l.finished IS NOT NULL AND l.attempt IS NOT NULL THEN l.jobs END),
            ('retry', '', '', CASE WHEN l.event = 'exhausted' THEN 'max_retries_exceeded'
                                   WHEN l.reason = 'worker_lost' THEN 'lease_timeout' ELSE 'worker_failure' END,
             least(l.attempt - (l.event = 'exhausted')::int, 1000),
             CASE WHEN l.attempt IS NOT NULL AND l.event IN ('retried', 'exhausted') THEN l.jobs END)
        ) AS v(name, queue, type, label, bucket, value)
        WHERE v.value IS NOT NULL
        GROUP BY 1, 2, 3, 4, 5
        ON CONFLICT ON CONSTRAINT totals_pkey DO UPDATE SET value = t.value + excluded.value
    ), seen AS (
        INSERT INTO pgqueue.series AS s (step, at, queue, name, bucket, value)
        SELECT p.step, date_bin(make_interval(secs => p.step), l.at, '2000-01-01'), l.queue, v.name, v.bucket, sum(v.value)
        FROM tally l CROSS JOIN (VALUES (60), (3600)) AS p(step) CROSS JOIN LATERAL (VALUES
            (CASE WHEN l.event <> 'exhausted' THEN l.event END, 0, l.jobs),
            ('took', l.took, CASE WHEN l.took IS NOT NULL THEN l.jobs END),
            ('waited', l.waited, CASE WHEN l.waited IS NOT NULL THEN l.jobs END)
        ) AS v(name, bucket, value)
        WHERE v.value IS NOT NULL AND v.name IS NOT NULL
        GROUP BY 1, 2, 3, 4, 5
        ON CONFLICT ON CONSTRAINT series_pkey DO UPDATE SET value = s.value + excluded.value
    )
    SELECT count(*) INTO folded FROM gone;
    RETURN folded;
END $$;

-- What keeps vacuum from removing dead rows, the oldest first: sessions of this database that have a snapshot or have
-- written, prepared transactions, replication slots, and standbys that report what their queries need. As its owner, who
-- may see more of other sessions than a worker does; of their statements it tells nothing.
-- Every snapshot is as old as the oldest transaction that runs when it is taken: while that one runs, it alone is told of.
-- VACUUM itself holds nothing back. Nor does the catalog_xmin of a slot, but for the catalogs; it is told when nobody reads
-- the slot, which then keeps the server's WAL as well.
CREATE FUNCTION pgqueue.snapshot_holders()
    RETURNS TABLE (kind text, name text, transactions integer, since timestamptz, what text, remedy text)
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    WITH running AS MATERIALIZED (
        SELECT a.backend_xid AS xid, a.pid::text AS name FROM pg_stat_activity a
        WHERE a.backend_xid IS NOT NULL AND a.datname = current_database()
        UNION ALL
        SELECT p.transaction, p.gid FROM pg_prepared_xacts p WHERE p.database = current_database()
    ), holder AS (
        SELECT CASE WHEN a.datid IS NULL THEN 'standby' ELSE 'session' END AS kind, a.pid::text AS name,
               CASE WHEN age(a.backend_xid) > age(a.backend_xmin) OR a.backend_xmin IS NULL
                    THEN a.backend_xid ELSE a.backend_xmin END AS xid,
               a.xact_start AS since,
               CASE WHEN a.datid IS NULL
                    THEN format('standby%s (process %s), which reports what its queries need', ' ' || nullif(a.application_name, ''), a.pid)
                    ELSE format('session %s (%s)', a.pid, concat_ws(', ', 'user ' || a.usename, nullif(a.application_name, ''),
                                a.state, 'in a transaction since ' || date_trunc('second', a.xact_start))) END AS what,
               CASE WHEN a.datid IS NULL
                    THEN 'end the long query there, or turn hot_standby_feedback off'
                    ELSE format('end its transaction, or end it: SELECT pg_terminate_backend(%s)', a.pid) END AS remedy
        FROM pg_stat_activity a
        WHERE (a.datid IS NULL OR a.datname = current_database()) AND a.pid <> pg_backend_pid()
          AND coalesce(a.backend_xid, a.backend_xmin) IS NOT NULL
          AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum v WHERE v.pid = a.pid)
        UNION ALL
        SELECT 'prepared', p.gid, p.transaction, p.prepared,
               format('prepared transaction %s (user %s, since %s)', p.gid, p.owner, date_trunc('second', p.prepared)),
               format('decide it: COMMIT PREPARED %1$L or ROLLBACK PREPARED %1$L', p.gid)
        FROM pg_prepared_xacts p WHERE p.database = current_database()
        UNION ALL
        SELECT 'slot', s.slot_name, CASE WHEN s.active OR age(s.xmin) > age(s.catalog_xmin) OR s.catalog_xmin IS NULL
                                         THEN s.xmin ELSE s.catalog_xmin END, NULL,
               format('replication slot %s%s', s.slot_name, CASE WHEN NOT s.active THEN ', which nobody reads' END),
               CASE WHEN s.active THEN 'end the long query of its standby, or turn hot_standby_feedback off there'
                    ELSE format('start its reader, or drop it: SELECT pg_drop_replication_slot(%L)', s.slot_name) END
        FROM pg_replication_slots s
        WHERE s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL AND NOT s.active
    )
    SELECT h.kind, h.name, age(h.xid), h.since, h.what, h.remedy
    FROM holder h
    WHERE NOT EXISTS (SELECT FROM running r WHERE r.xid = h.xid AND r.name <> h.name)
    ORDER BY 3 DESC
$$;

REVOKE ALL ON FUNCTION pgqueue.fold, pgqueue.snapshot_holders FROM PUBLIC;

DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['pgqueue_worker', 'pgqueue_auditor', 'pgqueue_operator', 'pgqueue_api'] LOOP
        CONTINUE WHEN NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role);
        EXECUTE format('GRANT SELECT ON pgqueue.totals, pgqueue.series TO %I', role);
        EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.fold, pgqueue.bounds, pgqueue.snapshot_holders TO %I', role);
    END LOOP;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_worker') THEN
        GRANT UPDATE, DELETE ON pgqueue.series TO pgqueue_worker;
    END IF;
END $$;

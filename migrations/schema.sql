CREATE SCHEMA pgqueue;

CREATE TYPE pgqueue.status AS ENUM (
    'scheduled',
    'pending',
    'running',
    'completed',
    'failed',
    'cancelled'
);

CREATE FUNCTION pgqueue.act_on_jobs(ids bigint[], action text, reason text DEFAULT NULL::text) RETURNS TABLE(id bigint, status text, problem text)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '500ms'
    AS $$
#variable_conflict use_variable
BEGIN
    -- In the order of their ids, so that two of these do not wait for each other.
    FOR id IN SELECT DISTINCT i FROM unnest(ids) i ORDER BY 1 LOOP
        BEGIN
            problem := NULL;
            CASE action
                WHEN 'retry' THEN status := pgqueue.retry_job(id, reason);
                WHEN 'cancel' THEN status := pgqueue.cancel_job(id, reason);
                WHEN 'delete' THEN
                    PERFORM pgqueue.delete_job(id, reason);
                    status := 'deleted';
            END CASE;
        EXCEPTION
            WHEN SQLSTATE 'PQ003' OR SQLSTATE 'PQ004' OR unique_violation OR check_violation THEN
                status := NULL;
                problem := SQLERRM;
            WHEN lock_not_available THEN
                status := NULL;
                problem := format('job %s is locked by another transaction: try again when that has ended', id);
                -- Those that are done wait with this one: it waits once, and for the next ones not at all.
                PERFORM set_config('lock_timeout', '1ms', true);
        END;
        RETURN NEXT;
    END LOOP;
END $$;

CREATE FUNCTION pgqueue.add_job(type text, payload jsonb DEFAULT '{}'::jsonb, queue text DEFAULT 'default'::text, priority integer DEFAULT 0, delay interval DEFAULT NULL::interval, run_at timestamp with time zone DEFAULT NULL::timestamp with time zone, thread_demand integer DEFAULT 1, max_attempts integer DEFAULT 5, timeout interval DEFAULT NULL::interval, idempotency_key text DEFAULT NULL::text, key_ttl interval DEFAULT '24:00:00'::interval, tags text[] DEFAULT '{}'::text[], name text DEFAULT NULL::text) RETURNS TABLE(id bigint, inserted boolean)
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    new_id bigint := nextval('pgqueue.job_ids');
    first_id bigint;
    first_print bytea;
    print bytea;
BEGIN
    IF add_job.idempotency_key IS NOT NULL THEN
        IF char_length(add_job.idempotency_key) NOT BETWEEN 1 AND 255 THEN
            RAISE EXCEPTION 'pgqueue.add_job: idempotency_key must be 1 to 255 characters'
                USING ERRCODE = 'check_violation', COLUMN = 'idempotency_key';
        END IF;
        -- In seconds, as above; '1 year' has a quarter of a day more than it says.
        IF add_job.key_ttl IS NULL OR extract(epoch FROM add_job.key_ttl) NOT BETWEEN 1 AND 31557600 THEN
            RAISE EXCEPTION 'pgqueue.add_job: key_ttl must be between 1 second and 365 days'
                USING ERRCODE = 'check_violation', COLUMN = 'key_ttl';
        END IF;
        print := pgqueue.fingerprint(add_job.type, add_job.payload);
        IF NOT pgqueue.take_key(add_job.idempotency_key, print, new_id, add_job.key_ttl) THEN
            SELECT k.job_id, k.fingerprint INTO first_id, first_print
            FROM pgqueue.idempotency_keys k WHERE k.key = add_job.idempotency_key;
            IF first_print <> print THEN
                RAISE EXCEPTION 'pgqueue.add_job: idempotency_key "%" belongs to job %, which has another type or payload',
                    add_job.idempotency_key, first_id
                    USING ERRCODE = 'PQ002', HINT = 'A key names one request: use another key for another request.';
            END IF;
            RETURN QUERY SELECT first_id, false;
            RETURN;
        END IF;
    END IF;
    IF add_job.delay IS NOT NULL AND add_job.run_at IS NOT NULL THEN
        RAISE EXCEPTION 'pgqueue.add_job: give delay or run_at, not both' USING ERRCODE = 'check_violation', COLUMN = 'delay';
    END IF;
    IF extract(epoch FROM add_job.delay) NOT BETWEEN -28401840000 AND 28401840000 THEN
        RAISE EXCEPTION 'pgqueue.add_job: delay must be finite and at most 900 years' USING ERRCODE = 'check_violation', COLUMN = 'delay';
    END IF;
    INSERT INTO pgqueue.jobs (id, type, payload, queue, priority, run_at, thread_demand, max_attempts, timeout,
                              idempotency_key, tags, name)
    VALUES (new_id, add_job.type, add_job.payload, add_job.queue, add_job.priority,
            coalesce(add_job.run_at, statement_timestamp() + add_job.delay, now()), add_job.thread_demand,
            add_job.max_attempts, add_job.timeout, add_job.idempotency_key, add_job.tags, add_job.name);
    RETURN QUERY SELECT new_id, true;
END $$;

CREATE FUNCTION pgqueue.assert_lease(job_id bigint, lease_token uuid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    PERFORM FROM pgqueue.jobs_live j
    WHERE j.id = assert_lease.job_id AND j.lease_token = assert_lease.lease_token AND j.status = 'running' FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the lease on job % is lost', assert_lease.job_id USING ERRCODE = 'PQ001',
            HINT = 'Another worker may have the job: roll back and do nothing more for it.';
    END IF;
END $$;

CREATE FUNCTION pgqueue.audit_access(action text, detail jsonb, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF action NOT IN ('create_token', 'add_user', 'set_password', 'remove_user') THEN
        RAISE EXCEPTION 'pgqueue.audit_access: action must be create_token, add_user, set_password or remove_user'
            USING ERRCODE = 'check_violation', COLUMN = 'action';
    END IF;
    PERFORM pgqueue.write_audit(action, NULL, NULL, audit_access.reason, audit_access.detail);
END $$;

CREATE FUNCTION pgqueue.backlog(queue text) RETURNS bigint
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    SELECT count(*) FROM pgqueue.jobs_live j WHERE j.queue = backlog.queue AND j.status IN ('pending', 'running')
$$;

CREATE FUNCTION pgqueue.bounds() RETURNS double precision[]
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ARRAY[(0.005)::double precision, (0.01)::double precision, (0.025)::double precision, (0.05)::double precision, (0.1)::double precision, (0.25)::double precision, (0.5)::double precision, (1)::double precision, (2.5)::double precision, (5)::double precision, (10)::double precision, (30)::double precision, (60)::double precision, (120)::double precision, (300)::double precision, (1800)::double precision, (3600)::double precision];

CREATE FUNCTION pgqueue.broken_rule(queue text, type text, priority integer, run_at timestamp with time zone, thread_demand integer, max_attempts integer, timeout interval, idempotency_key text, name text, tags text[], payload jsonb) RETURNS text[]
    LANGUAGE plpgsql STABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
BEGIN
    RETURN CASE
        WHEN queue <> 'default' AND queue !~ '^[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,62}$'
            THEN ARRAY['queue', 'must be 1 to 63 letters, digits or _.:/- and begin with a letter, digit or _']
        WHEN char_length(type) NOT BETWEEN 1 AND 128 OR type ~ '[[:cntrl:]]'
            THEN ARRAY['type', 'must be 1 to 128 characters without control characters']
        WHEN priority NOT BETWEEN -1000 AND 1000
            THEN ARRAY['priority', 'must be between -1000 and 1000 (higher runs first)']
        WHEN run_at NOT BETWEEN '1970-01-01+00' AND '2999-12-31+00'
            THEN ARRAY['run_at', 'must be a finite time between the years 1970 and 2999']
        WHEN thread_demand NOT BETWEEN 1 AND 1024
            THEN ARRAY['thread_demand', 'must be between 1 and 1024']
        WHEN max_attempts NOT BETWEEN 1 AND 1000
            THEN ARRAY['max_attempts', 'must be between 1 and 1000']
        WHEN extract(epoch FROM timeout) NOT BETWEEN 0.001 AND 31622400
            THEN ARRAY['timeout', 'must be between 1 millisecond and 366 days, or NULL for none']
        WHEN char_length(idempotency_key) NOT BETWEEN 1 AND 255
            THEN ARRAY['idempotency_key', 'must be 1 to 255 characters']
        WHEN char_length(name) > 200
            THEN ARRAY['name', 'must be at most 200 characters']
        WHEN tags <> '{}' AND (
                cardinality(tags) > 32 OR array_ndims(tags) > 1 OR array_position(tags, NULL) IS NOT NULL
                OR octet_length(array_to_string(tags, '')) > 2048)
            THEN ARRAY['tags', 'must be a flat array of at most 32 texts, 2048 bytes together, without NULL']
        WHEN octet_length(payload::text) > 1048576
            THEN ARRAY['payload', 'must be at most 1 MiB of JSON: store large data elsewhere and pass a reference']
    END;
END $_$;

CREATE FUNCTION pgqueue.bucket(seconds double precision) RETURNS integer
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN (width_bucket((seconds - (0.000000001)::double precision), pgqueue.bounds()) + 1);

CREATE FUNCTION pgqueue.cancel_job(job_id bigint, reason text DEFAULT NULL::text) RETURNS pgqueue.status
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    job pgqueue.jobs_live;
BEGIN
    SELECT * INTO job FROM pgqueue.jobs_live j WHERE j.id = cancel_job.job_id FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM pgqueue.refuse_status(cancel_job.job_id, 'cancelled', 'scheduled, pending or running');
    END IF;
    IF job.status = 'running' THEN
        UPDATE pgqueue.jobs_live j SET cancel_requested_at = coalesce(j.cancel_requested_at, statement_timestamp())
        WHERE j.id = job.id;
        -- A hint, too: the worker looks once a second.
        IF EXISTS (SELECT FROM pgqueue.workers w WHERE w.id = job.worker_id AND w.listening)
            AND pg_notification_queue_usage() < 0.5 THEN
            PERFORM pg_notify('pgqueue_' || job.worker_id, 'cancel');
        END IF;
    ELSE
        DELETE FROM pgqueue.jobs_live j WHERE j.id = job.id;
        job.status := 'cancelled';
        job.parked := false;
        job.reason := 'cancelled';
        job.error := cancel_job.reason;
        job.finished_at := statement_timestamp();
        INSERT INTO pgqueue.jobs_finished SELECT job.*;
        INSERT INTO pgqueue.tallies (event, queue, type, jobs) VALUES ('cancelled', job.queue, job.type, 1);
    END IF;
    PERFORM pgqueue.write_audit('cancel', job.id, job.queue, cancel_job.reason);
    RETURN job.status;
END $$;

CREATE FUNCTION pgqueue.claim_jobs(queues text[], priorities integer[], floors bigint[], types text[], threads integer, max_jobs integer, worker_id uuid, lease_token uuid) RETURNS TABLE(id bigint, queue text, type text, payload text, priority integer, seq bigint, thread_demand integer, timeout double precision, max_attempts integer, attempt integer, lost integer, idempotency_key text, created double precision, parked boolean)
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    fit tid[];
    unfit tid[];
BEGIN
    SELECT array_agg(t.place) FILTER (WHERE t.fits), array_agg(t.place) FILTER (WHERE NOT t.fits) INTO fit, unfit
    FROM (
        SELECT t.*
        FROM (
            SELECT l.* FROM unnest(claim_jobs.queues, claim_jobs.priorities, claim_jobs.floors)
                WITH ORDINALITY AS l(queue, priority, floor, place)
            WHERE NOT EXISTS (SELECT FROM pgqueue.queues q WHERE q.name = l.queue AND q.paused_at IS NOT NULL)
            ORDER BY l.place
        ) l
        CROSS JOIN LATERAL (
            SELECT j.ctid AS place,
                   (claim_jobs.types IS NULL OR j.type = ANY (claim_jobs.types))
                   AND (j.thread_demand <= claim_jobs.threads OR NOT EXISTS (
                       -- One who knows it and is large enough; only asked for a job that is too large for this worker.
                       SELECT FROM pgqueue.workers w
                       WHERE w.threads >= j.thread_demand AND w.expires_at > statement_timestamp()
                         AND w.stopped_at IS NULL AND NOT w.draining
                         AND (w.queues IS NULL OR j.queue = ANY (w.queues))
                         AND (w.types IS NULL OR j.type = ANY (w.types))
                   )) AS fits
            FROM pgqueue.jobs_live j
            WHERE j.status = 'pending' AND NOT j.parked
              AND j.queue = l.queue AND j.priority = l.priority AND j.seq >= coalesce(l.floor, 0)
            ORDER BY j.seq
            LIMIT claim_jobs.max_jobs
            FOR UPDATE SKIP LOCKED
        ) t
        LIMIT claim_jobs.max_jobs
    ) t;
    IF fit IS NOT NULL THEN
        RETURN QUERY
        UPDATE pgqueue.jobs_live j
        SET status = 'running', worker_id = claim_jobs.worker_id, lease_token = claim_jobs.lease_token,
            started_at = statement_timestamp(), threads_used = NULL
        WHERE j.ctid = ANY (fit)
        RETURNING j.id, j.queue, j.type, j.payload::text, j.priority, j.seq, j.thread_demand,
            extract(epoch FROM j.timeout)::float8, j.max_attempts, j.attempt, j.lost, j.idempotency_key,
            date_part('epoch', j.created_at), j.parked;
    END IF;
    IF unfit IS NOT NULL THEN
        RETURN QUERY
        UPDATE pgqueue.jobs_live j SET parked = true, started_at = NULL, threads_used = NULL
        WHERE j.ctid = ANY (unfit)
        RETURNING j.id, j.queue, j.type, j.payload::text, j.priority, j.seq, j.thread_demand,
            extract(epoch FROM j.timeout)::float8, j.max_attempts, j.attempt, j.lost, j.idempotency_key,
            date_part('epoch', j.created_at), j.parked;
    END IF;
END $$;

CREATE FUNCTION pgqueue.complete_jobs(ids bigint[], tokens uuid[], results jsonb[], threads integer[], started_ago double precision[], ended_ago double precision[], patience text DEFAULT NULL::text) RETURNS SETOF bigint
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET plan_cache_mode TO 'force_generic_plan'
    SET jit TO 'off'
    SET enable_seqscan TO 'off'
    SET enable_bitmapscan TO 'off'
    SET enable_hashjoin TO 'off'
    SET enable_mergejoin TO 'off'
    AS $$
#variable_conflict use_column
DECLARE
    ended bigint[];
BEGIN
    IF patience IS NOT NULL THEN
        -- An assignment: as a query it would take several times as long.
        patience := set_config('lock_timeout', patience, true);
    END IF;
    WITH gone AS (
        DELETE FROM pgqueue.jobs_live j
        USING (
            SELECT * FROM unnest(complete_jobs.ids, complete_jobs.tokens, complete_jobs.results, complete_jobs.threads,
                                 complete_jobs.started_ago, complete_jobs.ended_ago)
                AS d(id, lease_token, result, threads_used, started_ago, ended_ago)
            ORDER BY d.id
        ) d
        WHERE j.id = ANY (ARRAY[d.id]) AND j.lease_token = d.lease_token
        RETURNING j.id, j.queue, j.type, j.name, j.payload, j.priority, j.seq, j.run_at, j.thread_demand, j.timeout,
            j.max_attempts, j.attempt, j.lost, j.idempotency_key, j.tags, j.created_at, j.worker_id, j.lease_token,
            d.threads_used, statement_timestamp() - make_interval(secs => d.started_ago) AS started_at,
            j.cancel_requested_at, j.progress, statement_timestamp() - make_interval(secs => d.ended_ago) AS finished_at,
            d.result, d.started_ago - d.ended_ago AS seconds,
            greatest(0, date_part('epoch', statement_timestamp() - j.run_at) - d.started_ago) AS wait_seconds
    ), counted AS (
        INSERT INTO pgqueue.tallies (event, queue, type, attempt, took, seconds, waited, wait_seconds, jobs)
        SELECT 'completed', c.queue, c.type, c.attempt, c.took, sum(c.seconds), c.waited, sum(c.wait_seconds), count(*)
        FROM (
            SELECT g.queue, g.type, g.attempt + 1 AS attempt, g.seconds, pgqueue.bucket(g.seconds) AS took,
                   g.wait_seconds, pgqueue.bucket(g.wait_seconds) AS waited
            FROM gone g
        ) c
        GROUP BY 2, 3, 4, 5, 7
    ), kept AS (
        INSERT INTO pgqueue.jobs_finished AS f (id, queue, type, name, payload, status, priority, seq, run_at,
            thread_demand, timeout, max_attempts, attempt, lost, idempotency_key, tags, created_at, worker_id,
            lease_token, threads_used, started_at, cancel_requested_at, progress, finished_at, result)
        SELECT g.id, g.queue, g.type, g.name, g.payload, 'completed', g.priority, g.seq, g.run_at,
            g.thread_demand, g.timeout, g.max_attempts, g.attempt + 1, g.lost, g.idempotency_key, g.tags, g.created_at,
            g.worker_id, g.lease_token, g.threads_used, g.started_at, g.cancel_requested_at, g.progress, g.finished_at,
            g.result
        FROM gone g
        RETURNING f.id
    )
    SELECT coalesce(array_agg(k.id), '{}') INTO ended FROM kept k;
    IF cardinality(ended) < cardinality(complete_jobs.ids) THEN
        RETURN QUERY SELECT d.id FROM unnest(complete_jobs.ids) AS d(id) WHERE d.id <> ALL (ended);
    END IF;
END $$;

CREATE FUNCTION pgqueue.delete_job(job_id bigint, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    job pgqueue.jobs;
BEGIN
    DELETE FROM pgqueue.jobs j WHERE j.id = delete_job.job_id AND j.status IN ('completed', 'failed', 'cancelled')
    RETURNING * INTO job;
    IF NOT FOUND THEN
        PERFORM pgqueue.refuse_status(delete_job.job_id, 'deleted', 'completed, failed or cancelled');
    END IF;
    DELETE FROM pgqueue.attempts a WHERE a.job_id = job.id;
    DELETE FROM pgqueue.steps s WHERE s.job_id = job.id;
    PERFORM pgqueue.write_audit('delete', job.id, job.queue, delete_job.reason,
        jsonb_build_object('type', job.type, 'was', job.status));
END $$;

CREATE FUNCTION pgqueue.drain_worker(worker_id uuid, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgqueue.workers w WHERE w.id = drain_worker.worker_id AND w.stopped_at IS NULL) THEN
        RAISE EXCEPTION 'worker % does not run', drain_worker.worker_id USING ERRCODE = 'PQ004';
    END IF;
    INSERT INTO pgqueue.drains VALUES (drain_worker.worker_id) ON CONFLICT DO NOTHING;
    PERFORM pgqueue.write_audit('drain', NULL, NULL, drain_worker.reason, jsonb_build_object('worker', drain_worker.worker_id));
END $$;

CREATE FUNCTION pgqueue.drop_partitions(keep interval) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    SET lock_timeout TO '500ms'
    AS $_$
DECLARE
    until date := now() - keep;
    leaf text;
    ready text[] := '{}';
    dropped integer := 0;
BEGIN
    IF keep < interval '1 day' THEN
        RAISE EXCEPTION 'pgqueue.drop_partitions: keep must be at least 1 day' USING ERRCODE = 'check_violation';
    END IF;
    PERFORM FROM pgqueue.chores c WHERE c.name = 'partitions' FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    FOR leaf IN
        SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent IN ('pgqueue.jobs_finished'::regclass, 'pgqueue.attempts'::regclass)
          AND (c.relname ~ '_default$'
               OR c.relname ~ '_[0-9]{8}$' AND to_date(right(c.relname, 8), 'YYYYMMDD') + 1 <= until)
        ORDER BY c.relname
    LOOP
        BEGIN
            IF leaf LIKE 'jobs%' THEN
                EXECUTE format('UPDATE pgqueue.idempotency_keys k SET result = f.result FROM pgqueue.%I f '
                               'WHERE f.id = k.job_id AND f.result IS NOT NULL AND k.expires_at > now() '
                               'AND f.finished_at < $1', leaf) USING until;
            END IF;
            IF leaf LIKE '%default' THEN
                EXECUTE format('DELETE FROM pgqueue.%I f WHERE f.finished_at < $1', leaf) USING until;
            ELSE
                ready := ready || leaf;
            END IF;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    FOREACH leaf IN ARRAY ready LOOP
        BEGIN
            EXECUTE format('DROP TABLE pgqueue.%I', leaf);
            dropped := dropped + 1;
        EXCEPTION WHEN lock_not_available THEN
            EXIT;
        END;
    END LOOP;
    RETURN dropped;
END $_$;

CREATE FUNCTION pgqueue.edit_job(job_id bigint, changes jsonb, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    old pgqueue.jobs;
    new pgqueue.jobs;
    field text;
    broken text[];
BEGIN
    FOR field IN SELECT jsonb_object_keys(edit_job.changes) LOOP
        IF field NOT IN ('payload', 'queue', 'priority', 'run_at', 'thread_demand', 'timeout', 'max_attempts', 'tags', 'name') THEN
            RAISE EXCEPTION 'pgqueue.edit_job: % cannot be edited', field USING ERRCODE = 'check_violation', COLUMN = field,
                HINT = 'Editable: payload, queue, priority, run_at, thread_demand, timeout, max_attempts, tags, name.';
        END IF;
    END LOOP;
    SELECT * INTO old FROM pgqueue.jobs j
    WHERE j.id = edit_job.job_id AND j.status IN ('scheduled', 'pending', 'failed') FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM pgqueue.refuse_status(edit_job.job_id, 'edited', 'scheduled, pending or failed');
    END IF;
    new := jsonb_populate_record(old, edit_job.changes);
    broken := pgqueue.broken_rule(new.queue, new.type, new.priority, new.run_at, new.thread_demand, new.max_attempts,
        new.timeout, new.idempotency_key, new.name, new.tags, new.payload);
    IF broken IS NOT NULL THEN
        PERFORM pgqueue.refuse(broken);
    END IF;
    IF old.status = 'failed' THEN
        UPDATE pgqueue.jobs_failed j SET payload = new.payload, queue = new.queue, priority = new.priority,
            run_at = new.run_at, thread_demand = new.thread_demand, timeout = new.timeout, max_attempts = new.max_attempts,
            tags = new.tags, name = new.name
        WHERE j.id = old.id;
    ELSE
        -- A place in line is kept only by who stands there and stays: who joins a lane goes to its end.
        UPDATE pgqueue.jobs_live j SET payload = new.payload, queue = new.queue, priority = new.priority,
            run_at = new.run_at, thread_demand = new.thread_demand, timeout = new.timeout, max_attempts = new.max_attempts,
            tags = new.tags, name = new.name, parked = false,
            -- Who moves it names a time, whatever becomes of the clock: it is not put off by its last attempt any more.
            started_at = CASE WHEN new.run_at = old.run_at THEN j.started_at END,
            status = CASE WHEN new.run_at > statement_timestamp() THEN 'scheduled'::pgqueue.status ELSE 'pending' END,
            seq = CASE WHEN old.status = 'pending' AND NOT old.parked
                            AND (new.queue, new.priority, new.run_at) IS NOT DISTINCT FROM (old.queue, old.priority, old.run_at)
                       THEN j.seq ELSE nextval('pgqueue.ready') END
        WHERE j.id = old.id;
        PERFORM pgqueue.wake(ARRAY[new.queue], ARRAY[new.type], ARRAY[new.thread_demand]);
    END IF;
    PERFORM pgqueue.write_audit('edit', old.id, old.queue, edit_job.reason,
        jsonb_build_object('changes', edit_job.changes, 'was',
            (SELECT jsonb_object_agg(k, to_jsonb(old) -> k) FROM jsonb_object_keys(edit_job.changes) k)));
END $$;

CREATE FUNCTION pgqueue.fingerprint(type text, payload jsonb) RETURNS bytea
    LANGUAGE sql IMMUTABLE
    SET search_path TO 'pg_catalog', 'pg_temp'
    RETURN sha256(convert_to(COALESCE(((type || '
'::text) || (payload)::text), ''::text), 'UTF8'::name));

CREATE FUNCTION pgqueue.fold(wait boolean DEFAULT true) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET lock_timeout TO '2s'
    SET "TimeZone" TO 'UTC'
    AS $$
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

CREATE FUNCTION pgqueue.keep_key() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    IF NOT pgqueue.take_key(NEW.idempotency_key, pgqueue.fingerprint(NEW.type, NEW.payload), NEW.id, '24 hours') THEN
        RAISE EXCEPTION 'pgqueue.jobs: idempotency_key "%" belongs to another job', NEW.idempotency_key
            USING ERRCODE = 'unique_violation', SCHEMA = 'pgqueue', TABLE = 'jobs', COLUMN = 'idempotency_key',
                  CONSTRAINT = 'idempotency_keys_pkey',
                  HINT = 'SELECT * FROM pgqueue.add_job(...) answers with the first job instead.';
    END IF;
    RETURN NEW;
END $$;

CREATE FUNCTION pgqueue.make_partitions(ahead integer DEFAULT 7) RETURNS integer
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET "TimeZone" TO 'UTC'
    SET lock_timeout TO '2s'
    AS $$
DECLARE
    parent text;
    day date;
    leaf text;
    made integer := 0;
BEGIN
    PERFORM FROM pgqueue.chores c WHERE c.name = 'partitions' FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    FOREACH parent IN ARRAY ARRAY['jobs_finished', 'attempts'] LOOP
        FOR day IN SELECT generate_series(current_date - 1, current_date + ahead, interval '1 day') LOOP
            leaf := parent || to_char(day, '_YYYYMMDD');
            CONTINUE WHEN to_regclass(format('pgqueue.%I', leaf)) IS NOT NULL;
            EXECUTE format('LOCK TABLE pgqueue.%I IN ACCESS EXCLUSIVE MODE', parent || '_default');
            EXECUTE format('CREATE TABLE pgqueue.%I (LIKE pgqueue.%I INCLUDING DEFAULTS)', leaf, parent);
            EXECUTE format('WITH moved AS (DELETE FROM pgqueue.%I WHERE finished_at >= %L AND finished_at < %L RETURNING *) '
                           'INSERT INTO pgqueue.%I SELECT * FROM moved', parent || '_default', day, day + 1, leaf);
            EXECUTE format('ALTER TABLE pgqueue.%I ATTACH PARTITION pgqueue.%I FOR VALUES FROM (%L) TO (%L)', parent, leaf, day, day + 1);
            made := made + 1;
        END LOOP;
    END LOOP;
    RETURN made;
END $$;

CREATE FUNCTION pgqueue.pause_queue(queue text, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
BEGIN
    IF pause_queue.queue IS NULL OR pause_queue.queue !~ '^[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,62}$' THEN
        RAISE EXCEPTION 'pgqueue.pause_queue: queue must be the name of a queue: 1 to 63 letters, digits or _.:/-'
            USING ERRCODE = 'check_violation', COLUMN = 'queue';
    END IF;
    INSERT INTO pgqueue.queues AS q (name, paused_at, paused_by, reason)
    VALUES (pause_queue.queue, clock_timestamp(), coalesce(nullif(current_setting('pgqueue.actor', true), ''), session_user),
            pause_queue.reason)
    ON CONFLICT (name) DO UPDATE SET paused_at = coalesce(q.paused_at, excluded.paused_at),
        paused_by = excluded.paused_by, reason = excluded.reason;
    PERFORM pgqueue.write_audit('pause', NULL, pause_queue.queue, pause_queue.reason);
END $_$;

CREATE FUNCTION pgqueue.prune_access() RETURNS void
    LANGUAGE sql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    DELETE FROM pgqueue.refresh_tokens t WHERE t.hash IN (
        SELECT e.hash FROM pgqueue.refresh_tokens e WHERE e.expires_at <= statement_timestamp() FOR UPDATE SKIP LOCKED);
    DELETE FROM pgqueue.revoked_tokens t WHERE t.jti IN (
        SELECT e.jti FROM pgqueue.revoked_tokens e WHERE e.expires_at <= statement_timestamp() FOR UPDATE SKIP LOCKED);
    DELETE FROM pgqueue.http_answers a WHERE (a.subject, a.route, a.key) IN (
        SELECT e.subject, e.route, e.key FROM pgqueue.http_answers e WHERE e.expires_at <= statement_timestamp()
        ORDER BY e.expires_at LIMIT 10000 FOR UPDATE SKIP LOCKED)
$$;

CREATE FUNCTION pgqueue.refuse(rule text[]) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    RAISE EXCEPTION 'pgqueue.jobs: % %', rule[1], rule[2]
        USING ERRCODE = 'check_violation', SCHEMA = 'pgqueue', TABLE = 'jobs', COLUMN = rule[1];
END $$;

CREATE FUNCTION pgqueue.refuse_job() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    PERFORM pgqueue.refuse(coalesce(
        pgqueue.broken_rule(NEW.queue, NEW.type, NEW.priority, NEW.run_at, NEW.thread_demand, NEW.max_attempts,
            NEW.timeout, NEW.idempotency_key, NEW.name, NEW.tags, NEW.payload),
        ARRAY['status', 'is set by pgqueue: insert a job without status, attempt or lease columns']));
END $$;

CREATE FUNCTION pgqueue.refuse_status(job_id bigint, verb text, allowed text) RETURNS void
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    present pgqueue.status := (SELECT j.status FROM pgqueue.jobs j WHERE j.id = job_id);
BEGIN
    IF present IS NULL THEN
        RAISE EXCEPTION 'job % does not exist', job_id USING ERRCODE = 'PQ004';
    END IF;
    RAISE EXCEPTION 'job % is %: only a % job can be %', job_id, present, allowed, verb USING ERRCODE = 'PQ003';
END $$;

CREATE FUNCTION pgqueue.resolve_job(job_id bigint, outcome text, reason text DEFAULT NULL::text, result jsonb DEFAULT NULL::jsonb) RETURNS pgqueue.status
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    job pgqueue.jobs;
BEGIN
    IF outcome NOT IN ('completed', 'retry') OR outcome IS NULL THEN
        RAISE EXCEPTION 'pgqueue.resolve_job: outcome must be completed or retry' USING ERRCODE = 'check_violation', COLUMN = 'outcome';
    END IF;
    SELECT * INTO job FROM pgqueue.jobs_failed j WHERE j.id = resolve_job.job_id AND j.reason = 'in_doubt' FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM pgqueue.refuse_status(resolve_job.job_id, 'resolved', 'failed and in doubt');
    END IF;
    IF outcome = 'retry' THEN
        DELETE FROM pgqueue.effects e WHERE e.job_id = job.id AND e.done_at IS NULL;
        PERFORM pgqueue.retry_job(job.id, resolve_job.reason);
    ELSE
        -- It is remembered for as long as if it had been done now: others may have waited all the while.
        UPDATE pgqueue.effects e
        SET done_at = clock_timestamp(), result = resolve_job.result,
            expires_at = clock_timestamp() + (e.expires_at - e.begun_at)
        WHERE e.job_id = job.id AND e.done_at IS NULL;
        DELETE FROM pgqueue.jobs_failed j WHERE j.id = job.id;
        job.status := 'completed';
        job.result := resolve_job.result;
        job.reason := 'resolved';
        job.finished_at := clock_timestamp();
        INSERT INTO pgqueue.jobs_finished SELECT job.*;
        INSERT INTO pgqueue.tallies (event, queue, type, jobs) VALUES ('completed', job.queue, job.type, 1);
    END IF;
    PERFORM pgqueue.write_audit('resolve', job.id, job.queue, resolve_job.reason, jsonb_build_object('outcome', outcome));
    RETURN CASE outcome WHEN 'retry' THEN 'pending'::pgqueue.status ELSE 'completed' END;
END $$;

CREATE FUNCTION pgqueue.resume_queue(queue text, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    waiting pgqueue.jobs_live;
BEGIN
    UPDATE pgqueue.queues q SET paused_at = NULL, paused_by = NULL, reason = NULL WHERE q.name = resume_queue.queue;
    SELECT * INTO waiting FROM pgqueue.jobs_live j
    WHERE j.status = 'pending' AND NOT j.parked AND j.queue = resume_queue.queue ORDER BY j.priority DESC, j.seq LIMIT 1;
    IF FOUND THEN
        PERFORM pgqueue.wake(ARRAY[waiting.queue], ARRAY[waiting.type], ARRAY[waiting.thread_demand]);
    END IF;
    PERFORM pgqueue.write_audit('resume', NULL, resume_queue.queue, resume_queue.reason);
END $$;

CREATE FUNCTION pgqueue.retry_job(job_id bigint, reason text DEFAULT NULL::text) RETURNS pgqueue.status
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
DECLARE
    job pgqueue.jobs;
    was pgqueue.status;
BEGIN
    UPDATE pgqueue.jobs_live j SET status = 'pending', seq = nextval('pgqueue.ready'), run_at = statement_timestamp()
    WHERE j.id = retry_job.job_id AND j.status = 'scheduled' RETURNING * INTO job;
    was := 'scheduled';
    IF NOT FOUND THEN
        DELETE FROM pgqueue.jobs j WHERE j.id = retry_job.job_id AND j.status IN ('failed', 'cancelled')
        RETURNING * INTO job;
        IF NOT FOUND THEN
            PERFORM pgqueue.refuse_status(retry_job.job_id, 'retried', 'failed, cancelled or scheduled');
        END IF;
        was := job.status;
        -- The job lives again, and so does its key. Whoever waits for the key's row, or is about to prune it, cannot see the
        -- job yet, but sees this.
        UPDATE pgqueue.idempotency_keys k SET expires_at = greatest(k.expires_at, clock_timestamp() + interval '24 hours')
        WHERE k.key = job.idempotency_key AND k.job_id = job.id;
        INSERT INTO pgqueue.jobs_live (id, queue, type, name, payload, priority, run_at, thread_demand, timeout,
                                       max_attempts, idempotency_key, tags, created_at, progress)
        VALUES (job.id, job.queue, job.type, job.name, job.payload, job.priority, statement_timestamp(), job.thread_demand,
                job.timeout, job.max_attempts, job.idempotency_key, job.tags, job.created_at, job.progress);
    END IF;
    PERFORM pgqueue.wake(ARRAY[job.queue], ARRAY[job.type], ARRAY[job.thread_demand]);
    INSERT INTO pgqueue.tallies (event, queue, type, reason, jobs) VALUES ('retried', job.queue, job.type, 'manual', 1);
    PERFORM pgqueue.write_audit('retry', job.id, job.queue, retry_job.reason, jsonb_build_object('was', was));
    RETURN 'pending';
END $$;

CREATE FUNCTION pgqueue.revoke_token(jti text, expires_at timestamp with time zone, reason text DEFAULT NULL::text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO pgqueue.revoked_tokens (jti, expires_at) VALUES (revoke_token.jti, revoke_token.expires_at)
    ON CONFLICT ON CONSTRAINT revoked_tokens_pkey DO UPDATE
        SET expires_at = greatest(revoked_tokens.expires_at, excluded.expires_at), revoked_at = excluded.revoked_at;
    PERFORM pgqueue.write_audit('revoke_token', NULL, NULL, revoke_token.reason, jsonb_build_object('jti', revoke_token.jti));
END $$;

CREATE FUNCTION pgqueue.schedule_job() RETURNS trigger
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    NEW.status := 'scheduled';
    RETURN NEW;
END $$;

CREATE FUNCTION pgqueue.snapshot_holders() RETURNS TABLE(kind text, name text, transactions integer, since timestamp with time zone, what text, remedy text)
    LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $_$
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
$_$;

CREATE FUNCTION pgqueue.take_key(key text, fingerprint bytea, job_id bigint, ttl interval) RETURNS boolean
    LANGUAGE plpgsql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
BEGIN
    INSERT INTO pgqueue.idempotency_keys AS k (key, fingerprint, job_id, expires_at)
    VALUES (take_key.key, take_key.fingerprint, take_key.job_id, clock_timestamp() + take_key.ttl)
    ON CONFLICT ON CONSTRAINT idempotency_keys_pkey DO UPDATE
        SET fingerprint = excluded.fingerprint, job_id = excluded.job_id, expires_at = excluded.expires_at,
            created_at = excluded.created_at, result = NULL
        WHERE k.job_id <> excluded.job_id AND k.expires_at <= clock_timestamp()
          AND NOT EXISTS (SELECT FROM pgqueue.jobs_live j WHERE j.id = k.job_id)
          AND EXISTS (SELECT FROM pgqueue.idempotency_keys s WHERE s.key = k.key AND s.job_id = k.job_id);
    RETURN FOUND OR EXISTS (
        SELECT FROM pgqueue.idempotency_keys k WHERE k.key = take_key.key AND k.job_id = take_key.job_id);
END $$;

CREATE FUNCTION pgqueue.tell_of_inserted() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
DECLARE
    seeing boolean;
    queues text[];
    types text[];
    demands integer[];
BEGIN
    -- Here and not in a trigger of its own, which would cost a single insert twice as much.
    INSERT INTO pgqueue.tallies (event, queue, type, jobs)
    SELECT 'enqueued', n.queue, n.type, count(*) FROM inserted n WHERE n.status IN ('pending', 'scheduled') GROUP BY 2, 3;
    IF (SELECT s.enabled FROM pgqueue.switches s WHERE s.name = 'wake') IS false THEN
        RETURN NULL;
    END IF;
    seeing := pg_try_advisory_xact_lock_shared(1885827429, 1)
        AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable');
    IF seeing AND NOT EXISTS (SELECT FROM pgqueue.workers w
                              WHERE w.idle_since IS NOT NULL AND w.listening AND w.expires_at > statement_timestamp()) THEN
        RETURN NULL;
    END IF;
    -- A job that is due soon counts: who sleeps must look again when to get up.
    SELECT array_agg(j.queue), array_agg(j.type), array_agg(j.demand) INTO queues, types, demands
    FROM (SELECT n.queue, n.type, max(n.thread_demand) AS demand FROM inserted n
          WHERE n.status = 'pending' OR n.status = 'scheduled' AND n.run_at < clock_timestamp() + interval '2 seconds'
          GROUP BY n.queue, n.type LIMIT 100) j;
    IF queues IS NOT NULL THEN
        PERFORM pgqueue.wake(queues, types, demands);
    END IF;
    RETURN NULL;
END $$;

CREATE FUNCTION pgqueue.wake(queues text[], types text[], demands integer[]) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    SET enable_seqscan TO 'off'
    AS $$
DECLARE
    blind boolean := NOT pg_try_advisory_xact_lock_shared(1885827429, 1)
        OR current_setting('transaction_isolation') IN ('repeatable read', 'serializable');
    chosen uuid[];
BEGIN
    SELECT array_agg(DISTINCT w.id) INTO chosen
    FROM (SELECT DISTINCT j.queue, j.type, j.demand FROM unnest(queues, types, demands) AS j(queue, type, demand)) j
    CROSS JOIN LATERAL (
        SELECT w.id FROM pgqueue.workers w
        WHERE w.listening AND w.expires_at > statement_timestamp() AND w.expires_at > clock_timestamp()
          AND w.state <> 'unavailable' AND NOT w.draining
          AND (w.idle_since IS NOT NULL OR blind)
          AND (w.queues IS NULL OR j.queue = ANY (w.queues))
          AND (w.types IS NULL OR j.type = ANY (w.types))
        ORDER BY (w.threads >= j.demand) DESC, w.last_used_at
        LIMIT CASE WHEN blind THEN NULL ELSE 1 END
    ) w;
    -- Only a hint, it must not stop those who enqueue: when some listener does not read, the queue of the whole server fills
    -- up, and then every COMMIT with a NOTIFY is refused.
    IF chosen IS NOT NULL AND pg_notification_queue_usage() < 0.5 THEN
        PERFORM pg_notify('pgqueue_' || c.id, '') FROM unnest(chosen) AS c(id);
    END IF;
    RETURN chosen IS NOT NULL;
END $$;

CREATE FUNCTION pgqueue.why(job_id bigint) RETURNS TABLE(blocking boolean, reason text, detail text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
#variable_conflict use_column
DECLARE
    job pgqueue.jobs;
    owner pgqueue.workers;
    paused pgqueue.queues;
    live bigint;
    serving bigint;
    knowing bigint;
    large bigint;
    free bigint;
    ahead bigint;
BEGIN
    SELECT * INTO job FROM pgqueue.jobs j WHERE j.id = why.job_id;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'job % does not exist', why.job_id USING ERRCODE = 'PQ004';
    END IF;
    IF job.status IN ('completed', 'failed', 'cancelled') THEN
        RETURN QUERY SELECT true, job.status::text,
            concat('it ended at ', date_trunc('second', job.finished_at), ': ' || job.reason, ': ' || job.error);
        RETURN;
    END IF;
    IF job.status = 'running' THEN
        SELECT * INTO owner FROM pgqueue.workers w WHERE w.id = job.worker_id;
        IF owner.expires_at > clock_timestamp() AND owner.state <> 'unavailable' THEN
            RETURN QUERY SELECT false, 'running', format('worker %s has it since %s', owner.name, date_trunc('second', job.started_at));
        ELSE
            RETURN QUERY SELECT true, 'worker_lost', format('its worker %s is gone; the next rescue makes it pending',
                coalesce(owner.name, job.worker_id::text));
        END IF;
        RETURN;
    END IF;
    IF job.status = 'scheduled' THEN
        RETURN QUERY SELECT true, 'not_due', format('due at %s, in %s%s', job.run_at,
            greatest(date_trunc('second', job.run_at - clock_timestamp()), interval '0'),
            CASE WHEN job.attempt > 0 THEN format(' (attempt %s of %s failed: %s)', job.attempt, job.max_attempts, job.error) END);
    END IF;
    SELECT * INTO paused FROM pgqueue.queues q WHERE q.name = job.queue AND q.paused_at IS NOT NULL;
    IF FOUND THEN
        RETURN QUERY SELECT true, 'paused', format('queue %s was paused by %s at %s%s: SELECT pgqueue.resume_queue(%L)', job.queue,
            paused.paused_by, date_trunc('second', paused.paused_at), ' (' || paused.reason || ')', job.queue);
    END IF;
    SELECT count(*),
           count(*) FILTER (WHERE w.queues IS NULL OR job.queue = ANY (w.queues)),
           count(*) FILTER (WHERE (w.queues IS NULL OR job.queue = ANY (w.queues)) AND (w.types IS NULL OR job.type = ANY (w.types))),
           count(*) FILTER (WHERE (w.queues IS NULL OR job.queue = ANY (w.queues)) AND (w.types IS NULL OR job.type = ANY (w.types))
                              AND w.threads >= job.thread_demand),
           count(*) FILTER (WHERE (w.queues IS NULL OR job.queue = ANY (w.queues)) AND (w.types IS NULL OR job.type = ANY (w.types))
                              AND w.threads_used < w.threads)
    INTO live, serving, knowing, large, free
    FROM pgqueue.workers w WHERE w.expires_at > clock_timestamp() AND w.state <> 'unavailable' AND NOT w.draining;
    IF live = 0 THEN
        RETURN QUERY SELECT true, 'no_worker', 'no live worker: start one with "pgqueue worker"';
    ELSIF serving = 0 THEN
        RETURN QUERY SELECT true, 'no_worker_for_queue', format('none of %s live workers serves queue %s', live, job.queue);
    ELSIF knowing = 0 THEN
        RETURN QUERY SELECT true, 'no_worker_for_type', format('none of %s live workers of queue %s knows type %s', serving, job.queue, job.type);
    ELSIF free = 0 THEN
        RETURN QUERY SELECT true, 'workers_busy', format('all threads of %s live workers are in use', knowing);
    END IF;
    IF knowing > 0 AND large = 0 THEN
        RETURN QUERY SELECT false, 'too_few_threads', format('no live worker has %s threads: it will run with one', job.thread_demand);
    END IF;
    IF job.status = 'pending' THEN
        SELECT count(*) INTO ahead FROM (
            SELECT FROM pgqueue.jobs_live j
            WHERE j.status = 'pending' AND NOT j.parked AND j.queue = job.queue
              AND (j.priority > job.priority OR j.priority = job.priority AND j.seq < job.seq)
            LIMIT 10000) counted;
        RETURN QUERY SELECT ahead > 0, 'ahead', CASE
            WHEN ahead = 0 THEN 'it is the next of its queue'
            ELSE format('%s%s jobs of queue %s are ahead of it', CASE WHEN ahead = 10000 THEN 'at least ' END, ahead, job.queue) END;
    END IF;
END $$;

CREATE FUNCTION pgqueue.write_audit(action text, job_id bigint, queue text, reason text, detail jsonb DEFAULT '{}'::jsonb) RETURNS void
    LANGUAGE sql
    SET search_path TO 'pg_catalog', 'pg_temp'
    AS $$
    INSERT INTO pgqueue.audit (actor, action, job_id, queue, reason, detail)
    VALUES (coalesce(nullif(current_setting('pgqueue.actor', true), ''), session_user), action, job_id, queue, reason, detail)
$$;

CREATE TABLE pgqueue.alembic_version (
    version_num character varying(32) NOT NULL
);

CREATE SEQUENCE pgqueue.attempt_ids
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE pgqueue.attempts (
    id bigint DEFAULT nextval('pgqueue.attempt_ids'::regclass) NOT NULL,
    job_id bigint NOT NULL,
    attempt integer NOT NULL,
    outcome text NOT NULL,
    reason text NOT NULL,
    error_type text,
    error text,
    traceback text,
    worker_id uuid,
    started_at timestamp with time zone,
    finished_at timestamp with time zone DEFAULT statement_timestamp() NOT NULL
)
PARTITION BY RANGE (finished_at);

COMMENT ON TABLE pgqueue.attempts IS 'One row for every attempt that did not succeed.';

CREATE TABLE pgqueue.attempts_default (
    id bigint DEFAULT nextval('pgqueue.attempt_ids'::regclass) CONSTRAINT attempts_id_not_null NOT NULL,
    job_id bigint CONSTRAINT attempts_job_id_not_null NOT NULL,
    attempt integer CONSTRAINT attempts_attempt_not_null NOT NULL,
    outcome text CONSTRAINT attempts_outcome_not_null NOT NULL,
    reason text CONSTRAINT attempts_reason_not_null NOT NULL,
    error_type text,
    error text,
    traceback text,
    worker_id uuid,
    started_at timestamp with time zone,
    finished_at timestamp with time zone DEFAULT statement_timestamp() CONSTRAINT attempts_finished_at_not_null NOT NULL
);

CREATE TABLE pgqueue.audit (
    id bigint NOT NULL,
    at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    actor text NOT NULL,
    db_user text DEFAULT SESSION_USER NOT NULL,
    action text NOT NULL,
    job_id bigint,
    queue text,
    reason text,
    detail jsonb DEFAULT '{}'::jsonb NOT NULL
);

COMMENT ON TABLE pgqueue.audit IS 'What operators did. actor is who they say they are (SET pgqueue.actor), db_user is who PostgreSQL says they are.';

ALTER TABLE pgqueue.audit ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pgqueue.audit_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE pgqueue.chores (
    name text NOT NULL
);

CREATE TABLE pgqueue.drains (
    worker_id uuid NOT NULL
);

COMMENT ON TABLE pgqueue.drains IS 'The workers that are to drain. Their next heartbeat sets workers.draining.';

CREATE TABLE pgqueue.effects (
    key text NOT NULL,
    job_id bigint NOT NULL,
    lease_token uuid,
    begun_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    done_at timestamp with time zone,
    result jsonb,
    expires_at timestamp with time zone NOT NULL
);

COMMENT ON TABLE pgqueue.effects IS 'One row per effect that must not happen twice: begun by which job, and done or not.';

COMMENT ON COLUMN pgqueue.effects.lease_token IS 'Of the attempt that began it.';

CREATE SEQUENCE pgqueue.job_ids
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE SEQUENCE pgqueue.ready
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

CREATE TABLE pgqueue.jobs (
    id bigint DEFAULT nextval('pgqueue.job_ids'::regclass) NOT NULL,
    queue text DEFAULT 'default'::text NOT NULL,
    type text NOT NULL,
    name text,
    payload jsonb DEFAULT '{}'::jsonb NOT NULL,
    status pgqueue.status DEFAULT 'pending'::pgqueue.status NOT NULL,
    parked boolean DEFAULT false NOT NULL,
    priority integer DEFAULT 0 NOT NULL,
    seq bigint DEFAULT nextval('pgqueue.ready'::regclass) NOT NULL,
    run_at timestamp with time zone DEFAULT now() NOT NULL,
    thread_demand integer DEFAULT 1 NOT NULL,
    timeout interval,
    max_attempts integer DEFAULT 5 NOT NULL,
    attempt integer DEFAULT 0 NOT NULL,
    lost integer DEFAULT 0 NOT NULL,
    idempotency_key text,
    tags text[] DEFAULT '{}'::text[] NOT NULL,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    worker_id uuid,
    lease_token uuid,
    threads_used integer,
    started_at timestamp with time zone,
    cancel_requested_at timestamp with time zone,
    progress jsonb,
    finished_at timestamp with time zone,
    result jsonb,
    reason text,
    error_type text,
    error text
)
PARTITION BY LIST (status);

COMMENT ON TABLE pgqueue.jobs IS 'Every job. Insert here: (type, payload) is enough.';

COMMENT ON COLUMN pgqueue.jobs.parked IS 'Pending, but the worker that met it cannot run it: it waits for one that knows its type and has its threads.';

COMMENT ON COLUMN pgqueue.jobs.seq IS 'Place in readiness order, taken anew each time the job becomes ready.';

COMMENT ON COLUMN pgqueue.jobs.attempt IS 'Attempts that the handler ended, well or badly.';

COMMENT ON COLUMN pgqueue.jobs.lost IS 'Attempts that ended because the worker died.';

CREATE TABLE pgqueue.jobs_failed (
    id bigint DEFAULT nextval('pgqueue.job_ids'::regclass) NOT NULL,
    queue text DEFAULT 'default'::text CONSTRAINT jobs_queue_not_null NOT NULL,
    type text CONSTRAINT jobs_type_not_null NOT NULL,
    name text,
    payload jsonb DEFAULT '{}'::jsonb CONSTRAINT jobs_payload_not_null NOT NULL,
    status pgqueue.status DEFAULT 'pending'::pgqueue.status CONSTRAINT jobs_status_not_null NOT NULL,
    parked boolean DEFAULT false CONSTRAINT jobs_parked_not_null NOT NULL,
    priority integer DEFAULT 0 CONSTRAINT jobs_priority_not_null NOT NULL,
    seq bigint DEFAULT nextval('pgqueue.ready'::regclass) CONSTRAINT jobs_seq_not_null NOT NULL,
    run_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_run_at_not_null NOT NULL,
    thread_demand integer DEFAULT 1 CONSTRAINT jobs_thread_demand_not_null NOT NULL,
    timeout interval,
    max_attempts integer DEFAULT 5 CONSTRAINT jobs_max_attempts_not_null NOT NULL,
    attempt integer DEFAULT 0 CONSTRAINT jobs_attempt_not_null NOT NULL,
    lost integer DEFAULT 0 CONSTRAINT jobs_lost_not_null NOT NULL,
    idempotency_key text,
    tags text[] DEFAULT '{}'::text[] CONSTRAINT jobs_tags_not_null NOT NULL,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_created_at_not_null NOT NULL,
    worker_id uuid,
    lease_token uuid,
    threads_used integer,
    started_at timestamp with time zone,
    cancel_requested_at timestamp with time zone,
    progress jsonb,
    finished_at timestamp with time zone,
    result jsonb,
    reason text,
    error_type text,
    error text
);

CREATE VIEW pgqueue.failed_jobs AS
 SELECT id,
    queue,
    type,
    name,
    payload,
    reason,
    error_type,
    error,
    attempt AS attempts,
    max_attempts,
    lost,
    worker_id,
    created_at,
    started_at,
    finished_at AS failed_at
   FROM pgqueue.jobs_failed;

CREATE VIEW pgqueue.failure_groups AS
 SELECT type,
    reason,
    error_type,
    regexp_replace("left"(error, 200), '[0-9]+'::text, 'N'::text, 'g'::text) AS message,
    count(*) AS jobs,
    min(finished_at) AS first_failed_at,
    max(finished_at) AS last_failed_at,
    max(id) AS latest_job_id
   FROM pgqueue.jobs_failed
  GROUP BY type, reason, error_type, (regexp_replace("left"(error, 200), '[0-9]+'::text, 'N'::text, 'g'::text));

CREATE TABLE pgqueue.http_answers (
    subject text NOT NULL,
    route text NOT NULL,
    key text NOT NULL,
    fingerprint bytea NOT NULL,
    status integer,
    body text,
    location text,
    expires_at timestamp with time zone NOT NULL
);

CREATE TABLE pgqueue.idempotency_keys (
    key text NOT NULL,
    fingerprint bytea NOT NULL,
    job_id bigint NOT NULL,
    result jsonb,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    expires_at timestamp with time zone NOT NULL
);

COMMENT ON COLUMN pgqueue.idempotency_keys.result IS 'The result of its job, once the history of the day on which that ended is dropped; until then the job has it.';

CREATE VIEW pgqueue.job_metrics AS
 SELECT id,
    queue,
    type,
    name,
    status,
    attempt,
    worker_id,
    threads_used AS worker_threads,
    GREATEST((COALESCE(started_at, finished_at) - created_at), '00:00:00'::interval) AS queue_time,
    GREATEST((finished_at - COALESCE(started_at, finished_at)), '00:00:00'::interval) AS execution_time,
    GREATEST((finished_at - created_at), '00:00:00'::interval) AS total_time,
    created_at,
    started_at,
    finished_at
   FROM pgqueue.jobs
  WHERE (status = ANY (ARRAY['completed'::pgqueue.status, 'failed'::pgqueue.status, 'cancelled'::pgqueue.status]));

CREATE TABLE pgqueue.jobs_finished (
    id bigint DEFAULT nextval('pgqueue.job_ids'::regclass) NOT NULL,
    queue text DEFAULT 'default'::text CONSTRAINT jobs_queue_not_null NOT NULL,
    type text CONSTRAINT jobs_type_not_null NOT NULL,
    name text,
    payload jsonb DEFAULT '{}'::jsonb CONSTRAINT jobs_payload_not_null NOT NULL,
    status pgqueue.status DEFAULT 'pending'::pgqueue.status CONSTRAINT jobs_status_not_null NOT NULL,
    parked boolean DEFAULT false CONSTRAINT jobs_parked_not_null NOT NULL,
    priority integer DEFAULT 0 CONSTRAINT jobs_priority_not_null NOT NULL,
    seq bigint DEFAULT nextval('pgqueue.ready'::regclass) CONSTRAINT jobs_seq_not_null NOT NULL,
    run_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_run_at_not_null NOT NULL,
    thread_demand integer DEFAULT 1 CONSTRAINT jobs_thread_demand_not_null NOT NULL,
    timeout interval,
    max_attempts integer DEFAULT 5 CONSTRAINT jobs_max_attempts_not_null NOT NULL,
    attempt integer DEFAULT 0 CONSTRAINT jobs_attempt_not_null NOT NULL,
    lost integer DEFAULT 0 CONSTRAINT jobs_lost_not_null NOT NULL,
    idempotency_key text,
    tags text[] DEFAULT '{}'::text[] CONSTRAINT jobs_tags_not_null NOT NULL,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_created_at_not_null NOT NULL,
    worker_id uuid,
    lease_token uuid,
    threads_used integer,
    started_at timestamp with time zone,
    cancel_requested_at timestamp with time zone,
    progress jsonb,
    finished_at timestamp with time zone NOT NULL,
    result jsonb,
    reason text,
    error_type text,
    error text
)
PARTITION BY RANGE (finished_at);

CREATE TABLE pgqueue.jobs_finished_default (
    id bigint DEFAULT nextval('pgqueue.job_ids'::regclass) CONSTRAINT jobs_finished_id_not_null NOT NULL,
    queue text DEFAULT 'default'::text CONSTRAINT jobs_queue_not_null NOT NULL,
    type text CONSTRAINT jobs_type_not_null NOT NULL,
    name text,
    payload jsonb DEFAULT '{}'::jsonb CONSTRAINT jobs_payload_not_null NOT NULL,
    status pgqueue.status DEFAULT 'pending'::pgqueue.status CONSTRAINT jobs_status_not_null NOT NULL,
    parked boolean DEFAULT false CONSTRAINT jobs_parked_not_null NOT NULL,
    priority integer DEFAULT 0 CONSTRAINT jobs_priority_not_null NOT NULL,
    seq bigint DEFAULT nextval('pgqueue.ready'::regclass) CONSTRAINT jobs_seq_not_null NOT NULL,
    run_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_run_at_not_null NOT NULL,
    thread_demand integer DEFAULT 1 CONSTRAINT jobs_thread_demand_not_null NOT NULL,
    timeout interval,
    max_attempts integer DEFAULT 5 CONSTRAINT jobs_max_attempts_not_null NOT NULL,
    attempt integer DEFAULT 0 CONSTRAINT jobs_attempt_not_null NOT NULL,
    lost integer DEFAULT 0 CONSTRAINT jobs_lost_not_null NOT NULL,
    idempotency_key text,
    tags text[] DEFAULT '{}'::text[] CONSTRAINT jobs_tags_not_null NOT NULL,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_created_at_not_null NOT NULL,
    worker_id uuid,
    lease_token uuid,
    threads_used integer,
    started_at timestamp with time zone,
    cancel_requested_at timestamp with time zone,
    progress jsonb,
    finished_at timestamp with time zone CONSTRAINT jobs_finished_finished_at_not_null NOT NULL,
    result jsonb,
    reason text,
    error_type text,
    error text
);

CREATE TABLE pgqueue.jobs_live (
    id bigint DEFAULT nextval('pgqueue.job_ids'::regclass) NOT NULL,
    queue text DEFAULT 'default'::text CONSTRAINT jobs_queue_not_null NOT NULL,
    type text CONSTRAINT jobs_type_not_null NOT NULL,
    name text,
    payload jsonb DEFAULT '{}'::jsonb CONSTRAINT jobs_payload_not_null NOT NULL,
    status pgqueue.status DEFAULT 'pending'::pgqueue.status CONSTRAINT jobs_status_not_null NOT NULL,
    parked boolean DEFAULT false CONSTRAINT jobs_parked_not_null NOT NULL,
    priority integer DEFAULT 0 CONSTRAINT jobs_priority_not_null NOT NULL,
    seq bigint DEFAULT nextval('pgqueue.ready'::regclass) CONSTRAINT jobs_seq_not_null NOT NULL,
    run_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_run_at_not_null NOT NULL,
    thread_demand integer DEFAULT 1 CONSTRAINT jobs_thread_demand_not_null NOT NULL,
    timeout interval,
    max_attempts integer DEFAULT 5 CONSTRAINT jobs_max_attempts_not_null NOT NULL,
    attempt integer DEFAULT 0 CONSTRAINT jobs_attempt_not_null NOT NULL,
    lost integer DEFAULT 0 CONSTRAINT jobs_lost_not_null NOT NULL,
    idempotency_key text,
    tags text[] DEFAULT '{}'::text[] CONSTRAINT jobs_tags_not_null NOT NULL,
    created_at timestamp with time zone DEFAULT now() CONSTRAINT jobs_created_at_not_null NOT NULL,
    worker_id uuid,
    lease_token uuid,
    threads_used integer,
    started_at timestamp with time zone,
    cancel_requested_at timestamp with time zone,
    progress jsonb,
    finished_at timestamp with time zone,
    result jsonb,
    reason text,
    error_type text,
    error text,
    CONSTRAINT running_has_a_lease CHECK (((status = 'running'::pgqueue.status) = ((lease_token IS NOT NULL) AND (worker_id IS NOT NULL))))
)
WITH (fillfactor='80', autovacuum_vacuum_scale_factor='0.02', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_insert_scale_factor='0.2', autovacuum_analyze_scale_factor='0.05', autovacuum_analyze_threshold='5000', autovacuum_vacuum_cost_delay='0');

CREATE TABLE pgqueue.workers (
    id uuid NOT NULL,
    name text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    version text NOT NULL,
    queues text[],
    types text[],
    threads integer NOT NULL,
    threads_used integer DEFAULT 0 NOT NULL,
    state text DEFAULT 'available'::text NOT NULL,
    listening boolean DEFAULT false NOT NULL,
    draining boolean DEFAULT false NOT NULL,
    idle_since timestamp with time zone,
    last_used_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    completed bigint DEFAULT 0 NOT NULL,
    failed bigint DEFAULT 0 NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    heartbeat_at timestamp with time zone DEFAULT now() NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    stopped_at timestamp with time zone,
    CONSTRAINT workers_state_check CHECK ((state = ANY (ARRAY['available'::text, 'busy'::text, 'unavailable'::text])))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='200', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE pgqueue.workers IS 'One row per start of a worker process. A lease lives as long as its worker: until expires_at.';

COMMENT ON COLUMN pgqueue.workers.queues IS 'The queues that it serves; NULL is all of them.';

COMMENT ON COLUMN pgqueue.workers.types IS 'The types that it knows; NULL is all of them.';

CREATE VIEW pgqueue.leases AS
 SELECT j.id,
    j.queue,
    j.type,
    (j.attempt + 1) AS attempt,
    j.worker_id,
    w.name AS worker,
    w.host,
    w.pid,
    j.started_at AS lease_start,
    w.heartbeat_at,
    w.expires_at AS lease_until,
    COALESCE((w.expires_at <= clock_timestamp()), true) AS expired,
    j.cancel_requested_at
   FROM (pgqueue.jobs_live j
     LEFT JOIN pgqueue.workers w ON ((w.id = j.worker_id)))
  WHERE (j.status = 'running'::pgqueue.status);

CREATE TABLE pgqueue.queues (
    name text NOT NULL,
    paused_at timestamp with time zone,
    paused_by text,
    reason text
);

CREATE VIEW pgqueue.queue_stats AS
 SELECT COALESCE(s.queue, q.name) AS queue,
    (q.paused_at IS NOT NULL) AS paused,
    q.paused_by,
    q.reason AS paused_because,
    COALESCE(s.pending, (0)::bigint) AS pending,
    COALESCE(s.scheduled, (0)::bigint) AS scheduled,
    COALESCE(s.running, (0)::bigint) AS running,
    COALESCE(s.failed, (0)::bigint) AS failed,
        CASE
            WHEN (s.oldest_pending IS NOT NULL) THEN GREATEST((clock_timestamp() - s.oldest_pending), '00:00:00'::interval)
            ELSE NULL::interval
        END AS oldest_wait
   FROM (( SELECT jobs.queue,
            count(*) FILTER (WHERE (jobs.status = 'pending'::pgqueue.status)) AS pending,
            count(*) FILTER (WHERE (jobs.status = 'scheduled'::pgqueue.status)) AS scheduled,
            count(*) FILTER (WHERE (jobs.status = 'running'::pgqueue.status)) AS running,
            count(*) FILTER (WHERE (jobs.status = 'failed'::pgqueue.status)) AS failed,
            min(jobs.run_at) FILTER (WHERE (jobs.status = 'pending'::pgqueue.status)) AS oldest_pending
           FROM pgqueue.jobs
          WHERE (jobs.status = ANY (ARRAY['scheduled'::pgqueue.status, 'pending'::pgqueue.status, 'running'::pgqueue.status, 'failed'::pgqueue.status]))
          GROUP BY jobs.queue) s
     FULL JOIN pgqueue.queues q ON ((q.name = s.queue)));

CREATE TABLE pgqueue.refresh_tokens (
    hash bytea NOT NULL,
    family uuid NOT NULL,
    user_id bigint NOT NULL,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    used_at timestamp with time zone
);

CREATE TABLE pgqueue.revoked_tokens (
    jti text NOT NULL,
    expires_at timestamp with time zone NOT NULL,
    revoked_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT revoked_tokens_jti_check CHECK (((char_length(jti) >= 1) AND (char_length(jti) <= 255)))
);

COMMENT ON COLUMN pgqueue.revoked_tokens.jti IS 'The id of a token; or sub: and a subject, for all that it was given until then.';

CREATE TABLE pgqueue.series (
    step integer NOT NULL,
    at timestamp with time zone NOT NULL,
    queue text NOT NULL,
    name text NOT NULL,
    bucket integer NOT NULL,
    value double precision NOT NULL
)
WITH (fillfactor='50');

COMMENT ON TABLE pgqueue.series IS 'How often what happened in which minute (step 60) and hour (step 3600).';

CREATE TABLE pgqueue.steps (
    job_id bigint NOT NULL,
    name text NOT NULL,
    result jsonb,
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

CREATE TABLE pgqueue.switches (
    name text NOT NULL,
    enabled boolean NOT NULL
);

CREATE TABLE pgqueue.tallies (
    at timestamp with time zone DEFAULT statement_timestamp() NOT NULL,
    event text NOT NULL,
    queue text NOT NULL,
    type text NOT NULL,
    reason text,
    attempt integer,
    took integer,
    seconds double precision,
    waited integer,
    wait_seconds double precision,
    jobs bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='5000', autovacuum_vacuum_cost_delay='0');

ALTER TABLE ONLY pgqueue.tallies REPLICA IDENTITY FULL;

COMMENT ON TABLE pgqueue.tallies IS 'What happened and is not yet in totals: enqueued, completed, failed, cancelled, retried.';

COMMENT ON COLUMN pgqueue.tallies.took IS 'Which of pgqueue.bounds() the running time is below; NULL if it did not run.';

CREATE TABLE pgqueue.totals (
    name text NOT NULL,
    queue text NOT NULL,
    type text NOT NULL,
    label text NOT NULL,
    bucket integer NOT NULL,
    value double precision NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='1000', autovacuum_vacuum_cost_delay='0');

COMMENT ON TABLE pgqueue.totals IS 'How often what has happened since the beginning.';

CREATE TABLE pgqueue.types (
    name text NOT NULL,
    queue text NOT NULL,
    schema jsonb NOT NULL,
    described_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL
);

COMMENT ON TABLE pgqueue.types IS 'The types that workers have described: the JSON Schema of their payloads.';

CREATE TABLE pgqueue.users (
    id bigint NOT NULL,
    name text NOT NULL,
    password_hash text NOT NULL,
    scopes text[] NOT NULL,
    queues text[],
    created_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    CONSTRAINT users_name_check CHECK ((name ~ '^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}$'::text))
);

COMMENT ON COLUMN pgqueue.users.password_hash IS 'argon2id.';

COMMENT ON COLUMN pgqueue.users.queues IS 'Patterns of the queues that this user is confined to; NULL is all of them.';

ALTER TABLE pgqueue.users ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME pgqueue.users_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE VIEW pgqueue.worker_stats AS
 SELECT id,
    name,
    host,
    pid,
    version,
    state,
    queues,
    threads,
    threads_used,
    completed,
    failed,
    ( SELECT count(*) AS count
           FROM pgqueue.jobs_live j
          WHERE ((j.worker_id = w.id) AND (j.status = 'running'::pgqueue.status))) AS running,
    started_at,
    last_used_at,
    heartbeat_at,
    GREATEST((clock_timestamp() - heartbeat_at), '00:00:00'::interval) AS heartbeat_age,
    stopped_at
   FROM pgqueue.workers w;

ALTER TABLE ONLY pgqueue.attempts ATTACH PARTITION pgqueue.attempts_default DEFAULT;

ALTER TABLE ONLY pgqueue.jobs ATTACH PARTITION pgqueue.jobs_failed FOR VALUES IN ('failed');

ALTER TABLE ONLY pgqueue.jobs ATTACH PARTITION pgqueue.jobs_finished FOR VALUES IN ('completed', 'cancelled');

ALTER TABLE ONLY pgqueue.jobs_finished ATTACH PARTITION pgqueue.jobs_finished_default DEFAULT;

ALTER TABLE ONLY pgqueue.jobs ATTACH PARTITION pgqueue.jobs_live FOR VALUES IN ('scheduled', 'pending', 'running');

ALTER TABLE ONLY pgqueue.alembic_version
    ADD CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num);

ALTER TABLE ONLY pgqueue.attempts
    ADD CONSTRAINT attempts_pkey PRIMARY KEY (job_id, id, finished_at);

ALTER TABLE ONLY pgqueue.attempts_default
    ADD CONSTRAINT attempts_default_pkey PRIMARY KEY (job_id, id, finished_at);

ALTER TABLE ONLY pgqueue.audit
    ADD CONSTRAINT audit_pkey PRIMARY KEY (id);

ALTER TABLE ONLY pgqueue.chores
    ADD CONSTRAINT chores_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.drains
    ADD CONSTRAINT drains_pkey PRIMARY KEY (worker_id);

ALTER TABLE ONLY pgqueue.effects
    ADD CONSTRAINT effects_pkey PRIMARY KEY (key);

ALTER TABLE ONLY pgqueue.http_answers
    ADD CONSTRAINT http_answers_pkey PRIMARY KEY (subject, route, key);

ALTER TABLE ONLY pgqueue.idempotency_keys
    ADD CONSTRAINT idempotency_keys_pkey PRIMARY KEY (key);

ALTER TABLE ONLY pgqueue.jobs_failed
    ADD CONSTRAINT jobs_failed_pkey PRIMARY KEY (id);

ALTER TABLE ONLY pgqueue.jobs_finished
    ADD CONSTRAINT jobs_finished_pkey PRIMARY KEY (id, finished_at);

ALTER TABLE ONLY pgqueue.jobs_finished_default
    ADD CONSTRAINT jobs_finished_default_pkey PRIMARY KEY (id, finished_at);

ALTER TABLE ONLY pgqueue.jobs_live
    ADD CONSTRAINT jobs_live_pkey PRIMARY KEY (id);

ALTER TABLE ONLY pgqueue.queues
    ADD CONSTRAINT queues_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.refresh_tokens
    ADD CONSTRAINT refresh_tokens_pkey PRIMARY KEY (hash);

ALTER TABLE ONLY pgqueue.revoked_tokens
    ADD CONSTRAINT revoked_tokens_pkey PRIMARY KEY (jti);

ALTER TABLE ONLY pgqueue.series
    ADD CONSTRAINT series_pkey PRIMARY KEY (step, at, queue, name, bucket);

ALTER TABLE ONLY pgqueue.steps
    ADD CONSTRAINT steps_pkey PRIMARY KEY (job_id, name);

ALTER TABLE ONLY pgqueue.switches
    ADD CONSTRAINT switches_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.totals
    ADD CONSTRAINT totals_pkey PRIMARY KEY (name, queue, type, label, bucket);

ALTER TABLE ONLY pgqueue.types
    ADD CONSTRAINT types_pkey PRIMARY KEY (name);

ALTER TABLE ONLY pgqueue.users
    ADD CONSTRAINT users_pkey PRIMARY KEY (id);

ALTER TABLE ONLY pgqueue.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (id);

CREATE INDEX audit_job ON pgqueue.audit USING btree (job_id) WHERE (job_id IS NOT NULL);

CREATE INDEX effects_expiry ON pgqueue.effects USING btree (expires_at);

CREATE INDEX effects_job ON pgqueue.effects USING btree (job_id);

CREATE INDEX http_answers_expiry ON pgqueue.http_answers USING btree (expires_at);

CREATE INDEX idempotency_keys_expiry ON pgqueue.idempotency_keys USING btree (expires_at);

CREATE INDEX jobs_failed_newest ON pgqueue.jobs_failed USING btree (finished_at DESC, id DESC);

CREATE INDEX jobs_live_cancelling ON pgqueue.jobs_live USING btree (worker_id) WHERE (cancel_requested_at IS NOT NULL);

CREATE INDEX jobs_live_parked ON pgqueue.jobs_live USING btree (queue, type, priority DESC, seq) WHERE ((status = 'pending'::pgqueue.status) AND parked);

CREATE INDEX jobs_live_pending ON pgqueue.jobs_live USING btree (queue, priority DESC, seq) WHERE ((status = 'pending'::pgqueue.status) AND (NOT parked));

CREATE INDEX jobs_live_running ON pgqueue.jobs_live USING btree (worker_id) WHERE (status = 'running'::pgqueue.status);

CREATE INDEX jobs_live_scheduled ON pgqueue.jobs_live USING btree (run_at, id) WHERE (status = 'scheduled'::pgqueue.status);

CREATE INDEX refresh_tokens_expiry ON pgqueue.refresh_tokens USING btree (expires_at);

CREATE INDEX refresh_tokens_family ON pgqueue.refresh_tokens USING btree (family);

CREATE INDEX refresh_tokens_user ON pgqueue.refresh_tokens USING btree (user_id, family);

CREATE INDEX revoked_tokens_expiry ON pgqueue.revoked_tokens USING btree (expires_at);

CREATE INDEX steps_age ON pgqueue.steps USING btree (created_at);

CREATE UNIQUE INDEX users_name ON pgqueue.users USING btree (lower(name));

CREATE INDEX workers_expiry ON pgqueue.workers USING btree (expires_at);

ALTER INDEX pgqueue.attempts_pkey ATTACH PARTITION pgqueue.attempts_default_pkey;

ALTER INDEX pgqueue.jobs_finished_pkey ATTACH PARTITION pgqueue.jobs_finished_default_pkey;

CREATE TRIGGER a_rules BEFORE INSERT ON pgqueue.jobs_live FOR EACH ROW WHEN (((pgqueue.broken_rule(new.queue, new.type, new.priority, new.run_at, new.thread_demand, new.max_attempts, new.timeout, new.idempotency_key, new.name, new.tags, new.payload) IS NOT NULL) OR (new.status = 'running'::pgqueue.status) OR (new.attempt <> 0) OR (new.worker_id IS NOT NULL))) EXECUTE FUNCTION pgqueue.refuse_job();

CREATE TRIGGER b_schedule BEFORE INSERT ON pgqueue.jobs_live FOR EACH ROW WHEN (((new.status = 'pending'::pgqueue.status) AND (new.run_at > statement_timestamp()))) EXECUTE FUNCTION pgqueue.schedule_job();

CREATE TRIGGER c_key BEFORE INSERT ON pgqueue.jobs_live FOR EACH ROW WHEN ((new.idempotency_key IS NOT NULL)) EXECUTE FUNCTION pgqueue.keep_key();

CREATE TRIGGER tell AFTER INSERT ON pgqueue.jobs REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT EXECUTE FUNCTION pgqueue.tell_of_inserted();

ALTER TABLE ONLY pgqueue.drains
    ADD CONSTRAINT drains_worker_id_fkey FOREIGN KEY (worker_id) REFERENCES pgqueue.workers(id) ON DELETE CASCADE;

ALTER TABLE ONLY pgqueue.refresh_tokens
    ADD CONSTRAINT refresh_tokens_user_id_fkey FOREIGN KEY (user_id) REFERENCES pgqueue.users(id) ON DELETE CASCADE;

GRANT USAGE ON SCHEMA pgqueue TO pgqueue_producer;
GRANT USAGE ON SCHEMA pgqueue TO pgqueue_worker;
GRANT USAGE ON SCHEMA pgqueue TO pgqueue_auditor;
GRANT USAGE ON SCHEMA pgqueue TO pgqueue_operator;
GRANT USAGE ON SCHEMA pgqueue TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.act_on_jobs(ids bigint[], action text, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.act_on_jobs(ids bigint[], action text, reason text) TO pgqueue_api;
GRANT ALL ON FUNCTION pgqueue.act_on_jobs(ids bigint[], action text, reason text) TO pgqueue_operator;

REVOKE ALL ON FUNCTION pgqueue.add_job(type text, payload jsonb, queue text, priority integer, delay interval, run_at timestamp with time zone, thread_demand integer, max_attempts integer, timeout interval, idempotency_key text, key_ttl interval, tags text[], name text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.add_job(type text, payload jsonb, queue text, priority integer, delay interval, run_at timestamp with time zone, thread_demand integer, max_attempts integer, timeout interval, idempotency_key text, key_ttl interval, tags text[], name text) TO pgqueue_producer;
GRANT ALL ON FUNCTION pgqueue.add_job(type text, payload jsonb, queue text, priority integer, delay interval, run_at timestamp with time zone, thread_demand integer, max_attempts integer, timeout interval, idempotency_key text, key_ttl interval, tags text[], name text) TO pgqueue_worker;
GRANT ALL ON FUNCTION pgqueue.add_job(type text, payload jsonb, queue text, priority integer, delay interval, run_at timestamp with time zone, thread_demand integer, max_attempts integer, timeout interval, idempotency_key text, key_ttl interval, tags text[], name text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.assert_lease(job_id bigint, lease_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.assert_lease(job_id bigint, lease_token uuid) TO pgqueue_producer;
GRANT ALL ON FUNCTION pgqueue.assert_lease(job_id bigint, lease_token uuid) TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.audit_access(action text, detail jsonb, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.audit_access(action text, detail jsonb, reason text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.backlog(queue text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.backlog(queue text) TO pgqueue_worker;
GRANT ALL ON FUNCTION pgqueue.backlog(queue text) TO pgqueue_auditor;
GRANT ALL ON FUNCTION pgqueue.backlog(queue text) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.backlog(queue text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.bounds() FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.bounds() TO pgqueue_worker;
GRANT ALL ON FUNCTION pgqueue.bounds() TO pgqueue_auditor;
GRANT ALL ON FUNCTION pgqueue.bounds() TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.bounds() TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.bucket(seconds double precision) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.bucket(seconds double precision) TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.cancel_job(job_id bigint, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.cancel_job(job_id bigint, reason text) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.cancel_job(job_id bigint, reason text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.claim_jobs(queues text[], priorities integer[], floors bigint[], types text[], threads integer, max_jobs integer, worker_id uuid, lease_token uuid) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.claim_jobs(queues text[], priorities integer[], floors bigint[], types text[], threads integer, max_jobs integer, worker_id uuid, lease_token uuid) TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.complete_jobs(ids bigint[], tokens uuid[], results jsonb[], threads integer[], started_ago double precision[], ended_ago double precision[], patience text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.complete_jobs(ids bigint[], tokens uuid[], results jsonb[], threads integer[], started_ago double precision[], ended_ago double precision[], patience text) TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.delete_job(job_id bigint, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.delete_job(job_id bigint, reason text) TO pgqueue_api;
GRANT ALL ON FUNCTION pgqueue.delete_job(job_id bigint, reason text) TO pgqueue_operator;

REVOKE ALL ON FUNCTION pgqueue.drain_worker(worker_id uuid, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.drain_worker(worker_id uuid, reason text) TO pgqueue_api;
GRANT ALL ON FUNCTION pgqueue.drain_worker(worker_id uuid, reason text) TO pgqueue_operator;

REVOKE ALL ON FUNCTION pgqueue.drop_partitions(keep interval) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.drop_partitions(keep interval) TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.edit_job(job_id bigint, changes jsonb, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.edit_job(job_id bigint, changes jsonb, reason text) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.edit_job(job_id bigint, changes jsonb, reason text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.fingerprint(type text, payload jsonb) FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.fold(wait boolean) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.fold(wait boolean) TO pgqueue_worker;
GRANT ALL ON FUNCTION pgqueue.fold(wait boolean) TO pgqueue_auditor;
GRANT ALL ON FUNCTION pgqueue.fold(wait boolean) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.fold(wait boolean) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.keep_key() FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.make_partitions(ahead integer) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.make_partitions(ahead integer) TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.pause_queue(queue text, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.pause_queue(queue text, reason text) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.pause_queue(queue text, reason text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.prune_access() FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.prune_access() TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.refuse(rule text[]) FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.refuse_job() FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.refuse_status(job_id bigint, verb text, allowed text) FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.resolve_job(job_id bigint, outcome text, reason text, result jsonb) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.resolve_job(job_id bigint, outcome text, reason text, result jsonb) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.resolve_job(job_id bigint, outcome text, reason text, result jsonb) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.resume_queue(queue text, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.resume_queue(queue text, reason text) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.resume_queue(queue text, reason text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.retry_job(job_id bigint, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.retry_job(job_id bigint, reason text) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.retry_job(job_id bigint, reason text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.revoke_token(jti text, expires_at timestamp with time zone, reason text) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.revoke_token(jti text, expires_at timestamp with time zone, reason text) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.schedule_job() FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.snapshot_holders() FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.snapshot_holders() TO pgqueue_worker;
GRANT ALL ON FUNCTION pgqueue.snapshot_holders() TO pgqueue_auditor;
GRANT ALL ON FUNCTION pgqueue.snapshot_holders() TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.snapshot_holders() TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.take_key(key text, fingerprint bytea, job_id bigint, ttl interval) FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.tell_of_inserted() FROM PUBLIC;

REVOKE ALL ON FUNCTION pgqueue.wake(queues text[], types text[], demands integer[]) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.wake(queues text[], types text[], demands integer[]) TO pgqueue_worker;

REVOKE ALL ON FUNCTION pgqueue.why(job_id bigint) FROM PUBLIC;
GRANT ALL ON FUNCTION pgqueue.why(job_id bigint) TO pgqueue_worker;
GRANT ALL ON FUNCTION pgqueue.why(job_id bigint) TO pgqueue_auditor;
GRANT ALL ON FUNCTION pgqueue.why(job_id bigint) TO pgqueue_operator;
GRANT ALL ON FUNCTION pgqueue.why(job_id bigint) TO pgqueue_api;

REVOKE ALL ON FUNCTION pgqueue.write_audit(action text, job_id bigint, queue text, reason text, detail jsonb) FROM PUBLIC;

GRANT SELECT ON TABLE pgqueue.alembic_version TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.alembic_version TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.alembic_version TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.alembic_version TO pgqueue_api;

GRANT SELECT,USAGE ON SEQUENCE pgqueue.attempt_ids TO pgqueue_worker;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.attempts TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.attempts TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.attempts TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.attempts TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.attempts_default TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.attempts_default TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.attempts_default TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.audit TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.audit TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.audit TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.audit TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.chores TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.chores TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.chores TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.drains TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.drains TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.drains TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.drains TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.effects TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.effects TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.effects TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.effects TO pgqueue_api;

GRANT USAGE ON SEQUENCE pgqueue.job_ids TO pgqueue_producer;
GRANT SELECT,USAGE ON SEQUENCE pgqueue.job_ids TO pgqueue_worker;
GRANT USAGE ON SEQUENCE pgqueue.job_ids TO pgqueue_api;

GRANT USAGE ON SEQUENCE pgqueue.ready TO pgqueue_producer;
GRANT SELECT,USAGE ON SEQUENCE pgqueue.ready TO pgqueue_worker;
GRANT USAGE ON SEQUENCE pgqueue.ready TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.jobs TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.jobs TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.jobs TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT SELECT(id) ON TABLE pgqueue.jobs TO pgqueue_producer;

GRANT INSERT(queue) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(queue) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(type) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(type) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(name) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(name) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(payload) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(payload) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(priority) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(priority) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(run_at) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(run_at) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(thread_demand) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(thread_demand) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(timeout) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(timeout) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(max_attempts) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(max_attempts) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(idempotency_key) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(idempotency_key) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT INSERT(tags) ON TABLE pgqueue.jobs TO pgqueue_producer;
GRANT INSERT(tags) ON TABLE pgqueue.jobs TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.jobs_failed TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.jobs_failed TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.jobs_failed TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.jobs_failed TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.failed_jobs TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.failed_jobs TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.failed_jobs TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.failure_groups TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.failure_groups TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.failure_groups TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.http_answers TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.idempotency_keys TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.idempotency_keys TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.idempotency_keys TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.idempotency_keys TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.job_metrics TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.job_metrics TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.job_metrics TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.jobs_finished TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.jobs_finished TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.jobs_finished TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.jobs_finished TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.jobs_finished_default TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.jobs_finished_default TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.jobs_finished_default TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.jobs_live TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.jobs_live TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.jobs_live TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.jobs_live TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.workers TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.workers TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.workers TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.workers TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.leases TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.leases TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.leases TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.queues TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.queues TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.queues TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.queues TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.queue_stats TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.queue_stats TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.queue_stats TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.refresh_tokens TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.revoked_tokens TO pgqueue_api;

GRANT SELECT,DELETE,UPDATE ON TABLE pgqueue.series TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.series TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.series TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.series TO pgqueue_api;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.steps TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.steps TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.steps TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.steps TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.switches TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.switches TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.switches TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.switches TO pgqueue_api;

GRANT INSERT ON TABLE pgqueue.tallies TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.tallies TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.tallies TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.tallies TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.totals TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.totals TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.totals TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.totals TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.types TO pgqueue_api;
GRANT SELECT,INSERT,UPDATE ON TABLE pgqueue.types TO pgqueue_worker;
GRANT SELECT ON TABLE pgqueue.types TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.types TO pgqueue_operator;

GRANT SELECT,INSERT,DELETE,UPDATE ON TABLE pgqueue.users TO pgqueue_api;

GRANT SELECT ON TABLE pgqueue.worker_stats TO pgqueue_auditor;
GRANT SELECT ON TABLE pgqueue.worker_stats TO pgqueue_operator;
GRANT SELECT ON TABLE pgqueue.worker_stats TO pgqueue_api;

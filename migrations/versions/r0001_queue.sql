-- The queue: tables, rules, triggers, functions, views and roles.
-- A statement ends with a semicolon before an empty line; each is executed on its own.

CREATE TYPE pgqueue.status AS ENUM ('scheduled', 'pending', 'running', 'completed', 'failed', 'cancelled');

CREATE SEQUENCE pgqueue.job_ids;

CREATE SEQUENCE pgqueue.attempt_ids;

-- Readiness order. CACHE 1: a cached value would be handed out below the floors of others.
CREATE SEQUENCE pgqueue.ready CACHE 1;

CREATE TABLE pgqueue.jobs (
    id                  bigint          NOT NULL DEFAULT nextval('pgqueue.job_ids'),
    queue               text            NOT NULL DEFAULT 'default',
    type                text            NOT NULL,
    name                text,
    payload             jsonb           NOT NULL DEFAULT '{}',
    status              pgqueue.status  NOT NULL DEFAULT 'pending',
    parked              boolean         NOT NULL DEFAULT false,
    priority            integer         NOT NULL DEFAULT 0,
    seq                 bigint          NOT NULL DEFAULT nextval('pgqueue.ready'),
    run_at              timestamptz     NOT NULL DEFAULT now(),
    thread_demand       integer         NOT NULL DEFAULT 1,
    timeout             interval,
    max_attempts        integer         NOT NULL DEFAULT 5,
    attempt             integer         NOT NULL DEFAULT 0,
    lost                integer         NOT NULL DEFAULT 0,
    idempotency_key     text,
    tags                text[]          NOT NULL DEFAULT '{}',
    created_at          timestamptz     NOT NULL DEFAULT now(),
    worker_id           uuid,
    lease_token         uuid,
    threads_used        integer,
    started_at          timestamptz,
    cancel_requested_at timestamptz,
    progress            jsonb,
    finished_at         timestamptz,
    result              jsonb,
    reason              text,
    error_type          text,
    error               text
) PARTITION BY LIST (status);

COMMENT ON TABLE pgqueue.jobs IS 'Every job. Insert here: (type, payload) is enough.';

COMMENT ON COLUMN pgqueue.jobs.parked IS 'Pending, but the worker that met it cannot run it: it waits for one that knows its type and has its threads.';

COMMENT ON COLUMN pgqueue.jobs.seq IS 'Place in readiness order, taken anew each time the job becomes ready.';

COMMENT ON COLUMN pgqueue.jobs.attempt IS 'Attempts that the handler ended, well or badly.';

COMMENT ON COLUMN pgqueue.jobs.lost IS 'Attempts that ended because the worker died.';

-- Small and hot: scheduled, pending, running.
CREATE TABLE pgqueue.jobs_live PARTITION OF pgqueue.jobs (
    PRIMARY KEY (id),
    CONSTRAINT running_has_a_lease CHECK ((status = 'running') = (lease_token IS NOT NULL AND worker_id IS NOT NULL))
) FOR VALUES IN ('scheduled', 'pending', 'running')
WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_insert_scale_factor = 0.2,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0
);

-- The claim's index. A lane is one (queue, priority).
CREATE INDEX jobs_live_pending ON pgqueue.jobs_live (queue, priority DESC, seq) WHERE status = 'pending' AND NOT parked;

CREATE INDEX jobs_live_parked ON pgqueue.jobs_live (queue, type, priority DESC, seq) WHERE status = 'pending' AND parked;

CREATE INDEX jobs_live_scheduled ON pgqueue.jobs_live (run_at, id) WHERE status = 'scheduled';

CREATE INDEX jobs_live_running ON pgqueue.jobs_live (worker_id) WHERE status = 'running';

CREATE INDEX jobs_live_cancelling ON pgqueue.jobs_live (worker_id) WHERE cancel_requested_at IS NOT NULL;

-- The dead letter queue: never pruned by itself.
CREATE TABLE pgqueue.jobs_failed PARTITION OF pgqueue.jobs (PRIMARY KEY (id)) FOR VALUES IN ('failed');

CREATE INDEX jobs_failed_newest ON pgqueue.jobs_failed (finished_at DESC, id DESC);

-- History: a partition a day, dropped whole when its time is over.
CREATE TABLE pgqueue.jobs_finished PARTITION OF pgqueue.jobs (PRIMARY KEY (id, finished_at))
    FOR VALUES IN ('completed', 'cancelled') PARTITION BY RANGE (finished_at);

CREATE TABLE pgqueue.jobs_finished_default PARTITION OF pgqueue.jobs_finished DEFAULT;

CREATE TABLE pgqueue.attempts (
    id          bigint      NOT NULL DEFAULT nextval('pgqueue.attempt_ids'),
    job_id      bigint      NOT NULL,
    attempt     integer     NOT NULL,
    outcome     text        NOT NULL,
    reason      text        NOT NULL,
    error_type  text,
    error       text,
    traceback   text,
    worker_id   uuid,
    started_at  timestamptz,
    finished_at timestamptz NOT NULL DEFAULT statement_timestamp(),
    PRIMARY KEY (job_id, id, finished_at)
) PARTITION BY RANGE (finished_at);

COMMENT ON TABLE pgqueue.attempts IS 'One row for every attempt that did not succeed.';

CREATE TABLE pgqueue.attempts_default PARTITION OF pgqueue.attempts DEFAULT;

CREATE TABLE pgqueue.workers (
    id           uuid        PRIMARY KEY,
    name         text        NOT NULL,
    host         text        NOT NULL,
    pid          integer     NOT NULL,
    version      text        NOT NULL,
    queues       text[],
    types        text[],
    threads      integer     NOT NULL,
    threads_used integer     NOT NULL DEFAULT 0,
    state        text        NOT NULL DEFAULT 'available' CHECK (state IN ('available', 'busy', 'unavailable')),
    listening    boolean     NOT NULL DEFAULT false,
    draining     boolean     NOT NULL DEFAULT false,
    idle_since   timestamptz,
    last_used_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    completed    bigint      NOT NULL DEFAULT 0,
    failed       bigint      NOT NULL DEFAULT 0,
    started_at   timestamptz NOT NULL DEFAULT now(),
    heartbeat_at timestamptz NOT NULL DEFAULT now(),
    expires_at   timestamptz NOT NULL,
    stopped_at   timestamptz
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200, autovacuum_vacuum_cost_delay = 0);

COMMENT ON TABLE pgqueue.workers IS 'One row per start of a worker process. A lease lives as long as its worker: until expires_at.';

COMMENT ON COLUMN pgqueue.workers.queues IS 'The queues that it serves; NULL is all of them.';

COMMENT ON COLUMN pgqueue.workers.types IS 'The types that it knows; NULL is all of them.';

-- Every insert looks for idle workers, and heartbeats and idle marks leave dead versions of their rows, which stay as long
-- as anybody holds a snapshot. Those of the living are the ones that have not expired: no more than a lease leaves behind.
CREATE INDEX workers_expiry ON pgqueue.workers (expires_at);

-- Not a column that an operator writes: whoever leaves that transaction open would keep the worker from its heartbeat.
CREATE TABLE pgqueue.drains (
    worker_id uuid PRIMARY KEY REFERENCES pgqueue.workers ON DELETE CASCADE
);

COMMENT ON TABLE pgqueue.drains IS 'The workers that are to drain. Their next heartbeat sets workers.draining.';

CREATE TABLE pgqueue.queues (
    name      text PRIMARY KEY,
    paused_at timestamptz,
    paused_by text,
    reason    text
);

CREATE TABLE pgqueue.idempotency_keys (
    key         text        PRIMARY KEY,
    fingerprint bytea       NOT NULL,
    job_id      bigint      NOT NULL,
    result      jsonb,
    created_at  timestamptz NOT NULL DEFAULT now(),
    expires_at  timestamptz NOT NULL
);

COMMENT ON COLUMN pgqueue.idempotency_keys.result IS 'The result of its job, once the history of the day on which that ended is dropped; until then the job has it.';

CREATE INDEX idempotency_keys_expiry ON pgqueue.idempotency_keys (expires_at);

CREATE TABLE pgqueue.audit (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           timestamptz NOT NULL DEFAULT clock_timestamp(),
    actor        text        NOT NULL,
    db_user      text        NOT NULL DEFAULT session_user,
    action       text        NOT NULL,
    job_id       bigint,
    queue        text,
    reason       text,
    detail       jsonb       NOT NULL DEFAULT '{}'
);

COMMENT ON TABLE pgqueue.audit IS 'What operators did. actor is who they say they are (SET pgqueue.actor), db_user is who PostgreSQL says they are.';

CREATE INDEX audit_job ON pgqueue.audit (job_id) WHERE job_id IS NOT NULL;

-- What happened, counted. A statement that adds or ends jobs adds a few rows to tallies, in its own transaction and
-- without an index, so that nobody waits for anybody; pgqueue.fold() moves them to totals, which only grow, and to series.
CREATE TABLE pgqueue.tallies (
    at           timestamptz NOT NULL DEFAULT statement_timestamp(),
    event        text        NOT NULL,
    queue        text        NOT NULL,
    type         text        NOT NULL,
    reason       text,
    attempt      integer,
    took         integer,
    seconds      float8,
    waited       integer,
    wait_seconds float8,
    jobs         bigint      NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);

-- It has no key, and whoever publishes all tables must not keep fold() from deleting.
ALTER TABLE pgqueue.tallies REPLICA IDENTITY FULL;

COMMENT ON TABLE pgqueue.tallies IS 'What happened and is not yet in totals: enqueued, completed, failed, cancelled, retried.';

COMMENT ON COLUMN pgqueue.tallies.took IS 'Which of pgqueue.bounds() the running time is below; NULL if it did not run.';

-- The upper bounds of the histograms, in seconds.
CREATE FUNCTION pgqueue.bounds() RETURNS float8[] LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN ARRAY[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 1800, 3600]::float8[];

-- Which of them these seconds are within: 1 to 17, or 18 if they are more than all.
CREATE FUNCTION pgqueue.bucket(seconds float8) RETURNS integer LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN width_bucket(seconds - 1e-9, pgqueue.bounds()) + 1;

-- Switches are rows, not DDL: turning one needs no lock on the tables that everybody uses.
CREATE TABLE pgqueue.switches (
    name    text    PRIMARY KEY,
    enabled boolean NOT NULL
);

INSERT INTO pgqueue.switches (name, enabled) VALUES ('wake', true);

-- What one does at a time: whoever does it holds its row. An advisory lock could be held by everybody who can connect.
CREATE TABLE pgqueue.chores (
    name text PRIMARY KEY
);

INSERT INTO pgqueue.chores (name) VALUES ('partitions'), ('fold');

-- The rules for what strangers insert and operators edit: the column and the rule that is broken, or NULL.
-- The size of a payload is that of its text, which is what a claim sends. Its stored size says nothing: it may be
-- compressed, and 1e131071 is stored in 16 bytes. An interval is measured in seconds: months and days compare otherwise.
CREATE FUNCTION pgqueue.broken_rule(
    queue text, type text, priority integer, run_at timestamptz, thread_demand integer, max_attempts integer,
    timeout interval, idempotency_key text, name text, tags text[], payload jsonb
) RETURNS text[] LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
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
END $$;

CREATE FUNCTION pgqueue.refuse(rule text[]) RETURNS void LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'pgqueue.jobs: % %', rule[1], rule[2]
        USING ERRCODE = 'check_violation', SCHEMA = 'pgqueue', TABLE = 'jobs', COLUMN = rule[1];
END $$;

-- Runs only for a row that breaks a rule, and says which.
CREATE FUNCTION pgqueue.refuse_job() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM pgqueue.refuse(coalesce(
        pgqueue.broken_rule(NEW.queue, NEW.type, NEW.priority, NEW.run_at, NEW.thread_demand, NEW.max_attempts,
            NEW.timeout, NEW.idempotency_key, NEW.name, NEW.tags, NEW.payload),
        ARRAY['status', 'is set by pgqueue: insert a job without status, attempt or lease columns']));
END $$;

-- The rules stand in a trigger and not in CHECKs, because a CHECK is evaluated again by every claim and finish; and in a
-- function, because a WHEN is read again by every statement, which for one so long took a fifth of a single INSERT.
-- Not for UPDATE, which edit_job looks after: where a row has a BEFORE UPDATE trigger, every claim locks it once more.
CREATE TRIGGER a_rules BEFORE INSERT ON pgqueue.jobs_live FOR EACH ROW WHEN (
    pgqueue.broken_rule(NEW.queue, NEW.type, NEW.priority, NEW.run_at, NEW.thread_demand, NEW.max_attempts,
        NEW.timeout, NEW.idempotency_key, NEW.name, NEW.tags, NEW.payload) IS NOT NULL
    OR NEW.status = 'running' OR NEW.attempt <> 0 OR NEW.worker_id IS NOT NULL
) EXECUTE FUNCTION pgqueue.refuse_job();

CREATE FUNCTION pgqueue.schedule_job() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NEW.status := 'scheduled';
    RETURN NEW;
END $$;

CREATE TRIGGER b_schedule BEFORE INSERT ON pgqueue.jobs_live FOR EACH ROW
    WHEN (NEW.status = 'pending' AND NEW.run_at > statement_timestamp())
    EXECUTE FUNCTION pgqueue.schedule_job();

-- Never NULL: a job without type or payload is refused for that, and not for its fingerprint.
CREATE FUNCTION pgqueue.fingerprint(type text, payload jsonb) RETURNS bytea LANGUAGE sql IMMUTABLE
    SET search_path = pg_catalog, pg_temp
    RETURN sha256(convert_to(coalesce(type || E'\n' || payload::text, ''), 'UTF8'));

-- Takes a key for a job, unless a live one has it. A key lives until it expires and its job has finished. Whoever waited for
-- a transaction that took the key cannot see its job, nor that it has the key: then the job is taken for a live one.
CREATE FUNCTION pgqueue.take_key(key text, fingerprint bytea, job_id bigint, ttl interval) RETURNS boolean
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
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

CREATE FUNCTION pgqueue.keep_key() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT pgqueue.take_key(NEW.idempotency_key, pgqueue.fingerprint(NEW.type, NEW.payload), NEW.id, '24 hours') THEN
        RAISE EXCEPTION 'pgqueue.jobs: idempotency_key "%" belongs to another job', NEW.idempotency_key
            USING ERRCODE = 'unique_violation', SCHEMA = 'pgqueue', TABLE = 'jobs', COLUMN = 'idempotency_key',
                  CONSTRAINT = 'idempotency_keys_pkey',
                  HINT = 'SELECT * FROM pgqueue.add_job(...) answers with the first job instead.';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER c_key BEFORE INSERT ON pgqueue.jobs_live FOR EACH ROW WHEN (NEW.idempotency_key IS NOT NULL)
    EXECUTE FUNCTION pgqueue.keep_key();

-- Wakes, for each of these jobs, the idle worker that was used least recently and can run it; each worker once.
-- The lock says "somebody who may not have seen you idle is still at work": a worker that goes to sleep tries it. So it
-- comes first, and the look, with a newer snapshot, after it. (A function in SQL would take one snapshot for both.)
-- Nobody waits for the lock: whoever holds it alone, a worker for a moment or anybody else, must not stop those who enqueue.
-- A caller that did not get it, or whose snapshot is older than this statement, cannot know who is idle: it wakes them all.
-- The expiry is compared twice: with statement_timestamp() it can use the index, with clock_timestamp() it is exact.
CREATE FUNCTION pgqueue.wake(queues text[], types text[], demands integer[]) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
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

-- When everybody is busy, which is when it matters, it costs an insert two short looks, the second under the lock, and no
-- more. The queues are read into arrays, and not together with any other table.
CREATE FUNCTION pgqueue.tell_of_inserted() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
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

CREATE TRIGGER tell AFTER INSERT ON pgqueue.jobs REFERENCING NEW TABLE AS inserted FOR EACH STATEMENT
    EXECUTE FUNCTION pgqueue.tell_of_inserted();

CREATE FUNCTION pgqueue.add_job(
    type text, payload jsonb DEFAULT '{}', queue text DEFAULT 'default', priority integer DEFAULT 0,
    delay interval DEFAULT NULL, run_at timestamptz DEFAULT NULL, thread_demand integer DEFAULT 1,
    max_attempts integer DEFAULT 5, timeout interval DEFAULT NULL, idempotency_key text DEFAULT NULL,
    key_ttl interval DEFAULT '24 hours', tags text[] DEFAULT '{}', name text DEFAULT NULL
) RETURNS TABLE (id bigint, inserted boolean) LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$
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

CREATE FUNCTION pgqueue.write_audit(action text, job_id bigint, queue text, reason text, detail jsonb DEFAULT '{}')
    RETURNS void LANGUAGE sql SET search_path = pg_catalog, pg_temp AS $$
    INSERT INTO pgqueue.audit (actor, action, job_id, queue, reason, detail)
    VALUES (coalesce(nullif(current_setting('pgqueue.actor', true), ''), session_user), action, job_id, queue, reason, detail)
$$;

CREATE FUNCTION pgqueue.refuse_status(job_id bigint, verb text, allowed text) RETURNS void LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    present pgqueue.status := (SELECT j.status FROM pgqueue.jobs j WHERE j.id = job_id);
BEGIN
    IF present IS NULL THEN
        RAISE EXCEPTION 'job % does not exist', job_id USING ERRCODE = 'PQ004';
    END IF;
    RAISE EXCEPTION 'job % is %: only a % job can be %', job_id, present, allowed, verb USING ERRCODE = 'PQ003';
END $$;

-- scheduled, pending -> cancelled at once; a running job is asked to stop, and its worker ends it.
CREATE FUNCTION pgqueue.cancel_job(job_id bigint, reason text DEFAULT NULL) RETURNS pgqueue.status
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

-- failed, cancelled -> pending with fresh budgets; scheduled -> pending now. The id and the attempts stay.
CREATE FUNCTION pgqueue.retry_job(job_id bigint, reason text DEFAULT NULL) RETURNS pgqueue.status
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

-- Changes what a waiting or failed job will do. The rules for inserted rows hold here too.
CREATE FUNCTION pgqueue.edit_job(job_id bigint, changes jsonb, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

CREATE FUNCTION pgqueue.pause_queue(queue text, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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
END $$;

CREATE FUNCTION pgqueue.resume_queue(queue text, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

-- Holds the job's row until the caller's transaction ends: between this and its commit nobody else can get the job.
CREATE FUNCTION pgqueue.assert_lease(job_id bigint, lease_token uuid) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM pgqueue.jobs_live j
    WHERE j.id = assert_lease.job_id AND j.lease_token = assert_lease.lease_token AND j.status = 'running' FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the lease on job % is lost', assert_lease.job_id USING ERRCODE = 'PQ001',
            HINT = 'Another worker may have the job: roll back and do nothing more for it.';
    END IF;
END $$;

-- Claim and complete, the two writes of every job, are functions, so that their plans are made once a session and are
-- pinned to the indexes, whatever the statistics say. Parsed and planned each time, a claim of one job took twice as long,
-- and the planner would now and then scan the table and hash it.

-- pending -> running, in these lanes, each from its floor on (NULL: from its beginning).
-- A job that this worker cannot run is parked for one that can, so that nobody wades through it again. One that is too
-- large for every live worker that knows it fits anywhere: it runs with one thread.
-- The second statement has a newer snapshot than the first, so it sees every row that was locked as it was locked.
CREATE FUNCTION pgqueue.claim_jobs(
    queues text[], priorities integer[], floors bigint[], types text[], threads integer,
    max_jobs integer, worker_id uuid, lease_token uuid
) RETURNS TABLE (
    id bigint, queue text, type text, payload text, priority integer, seq bigint, thread_demand integer, timeout float8,
    max_attempts integer, attempt integer, lost integer, idempotency_key text, created float8, parked boolean
) LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
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

-- running -> completed, where the lease stands. Answers with the ids of the others: there are hardly ever any.
-- The rows are locked in the order of their ids, because the plan can only be to look up one sorted id after the other:
-- an id = id might walk the whole primary key instead, where it is full of dead entries and the planner thinks it is empty.
-- Only a running job has a lease_token (a CHECK says so), so the token alone is the fence. Saying status = 'running' as well
-- would tempt the planner to the index of running jobs, which is full of finished ones while a snapshot is held.
CREATE FUNCTION pgqueue.complete_jobs(
    ids bigint[], tokens uuid[], results jsonb[], threads integer[], started_ago float8[], ended_ago float8[],
    patience text DEFAULT NULL
) RETURNS SETOF bigint LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan SET jit = off
    SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
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

CREATE FUNCTION pgqueue.backlog(queue text) RETURNS bigint LANGUAGE sql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$
    SELECT count(*) FROM pgqueue.jobs_live j WHERE j.queue = backlog.queue AND j.status IN ('pending', 'running')
$$;

-- Why is this job not running: one row a reason, the ones that hold it back first.
CREATE FUNCTION pgqueue.why(job_id bigint) RETURNS TABLE (blocking boolean, reason text, detail text)
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

-- Makes the daily partitions from yesterday to `ahead` days from now. Rows that the default partition caught move along.
CREATE FUNCTION pgqueue.make_partitions(ahead integer DEFAULT 7) RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '2s' AS $$
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

-- Drops the daily partitions that are older than `keep`, and what is as old in the default ones, which caught it on days for
-- which nobody had made any. What is in use is left for the next time.
-- A key may outlive its job: then it keeps the first result. Not when the job completes, for whoever repeats a key in a
-- transaction that stays open holds the key's row, and nobody who finishes jobs may have to wait for that.
-- The keys come first, because they take long; from the first DROP on, everybody who finishes jobs waits for the end.
CREATE FUNCTION pgqueue.drop_partitions(keep interval) RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '500ms' AS $$
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
END $$;

SELECT pgqueue.make_partitions();

-- A clock that was set back makes no negative times.
CREATE VIEW pgqueue.job_metrics AS
SELECT id, queue, type, name, status, attempt, worker_id, threads_used AS worker_threads,
       greatest(coalesce(started_at, finished_at) - created_at, interval '0') AS queue_time,
       greatest(finished_at - coalesce(started_at, finished_at), interval '0') AS execution_time,
       greatest(finished_at - created_at, interval '0') AS total_time,
       created_at, started_at, finished_at
FROM pgqueue.jobs WHERE status IN ('completed', 'failed', 'cancelled');

CREATE VIEW pgqueue.failed_jobs AS
SELECT id, queue, type, name, payload, reason, error_type, error, attempt AS attempts, max_attempts, lost,
       worker_id, created_at, started_at, finished_at AS failed_at
FROM pgqueue.jobs_failed;

CREATE VIEW pgqueue.leases AS
SELECT j.id, j.queue, j.type, j.attempt + 1 AS attempt, j.worker_id, w.name AS worker, w.host, w.pid,
       j.started_at AS lease_start, w.heartbeat_at, w.expires_at AS lease_until,
       coalesce(w.expires_at <= clock_timestamp(), true) AS expired, j.cancel_requested_at
FROM pgqueue.jobs_live j LEFT JOIN pgqueue.workers w ON w.id = j.worker_id
WHERE j.status = 'running';

CREATE VIEW pgqueue.queue_stats AS
SELECT coalesce(s.queue, q.name) AS queue, q.paused_at IS NOT NULL AS paused, q.paused_by, q.reason AS paused_because,
       coalesce(s.pending, 0) AS pending, coalesce(s.scheduled, 0) AS scheduled, coalesce(s.running, 0) AS running,
       coalesce(s.failed, 0) AS failed, CASE WHEN s.oldest_pending IS NOT NULL THEN greatest(clock_timestamp() - s.oldest_pending, interval '0') END AS oldest_wait
FROM (
    SELECT queue, count(*) FILTER (WHERE status = 'pending') AS pending, count(*) FILTER (WHERE status = 'scheduled') AS scheduled,
           count(*) FILTER (WHERE status = 'running') AS running, count(*) FILTER (WHERE status = 'failed') AS failed,
           min(run_at) FILTER (WHERE status = 'pending') AS oldest_pending
    FROM pgqueue.jobs WHERE status IN ('scheduled', 'pending', 'running', 'failed') GROUP BY queue
) s FULL JOIN pgqueue.queues q ON q.name = s.queue;

CREATE VIEW pgqueue.worker_stats AS
SELECT w.id, w.name, w.host, w.pid, w.version, w.state, w.queues, w.threads, w.threads_used, w.completed, w.failed,
       (SELECT count(*) FROM pgqueue.jobs_live j WHERE j.worker_id = w.id AND j.status = 'running') AS running,
       w.started_at, w.last_used_at, w.heartbeat_at, greatest(clock_timestamp() - w.heartbeat_at, interval '0') AS heartbeat_age, w.stopped_at
FROM pgqueue.workers w;

CREATE VIEW pgqueue.failure_groups AS
SELECT type, reason, error_type, regexp_replace(left(error, 200), '[0-9]+', 'N', 'g') AS message, count(*) AS jobs,
       min(finished_at) AS first_failed_at, max(finished_at) AS last_failed_at, max(id) AS latest_job_id
FROM pgqueue.jobs_failed GROUP BY 1, 2, 3, 4;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA pgqueue FROM PUBLIC;

-- The trigger calls it as whoever inserts.
GRANT EXECUTE ON FUNCTION pgqueue.broken_rule TO PUBLIC;

-- The roles are made here if this user may, and are granted what they need if they are there. They belong to the whole
-- server, not to this database, so another database's migration may be making them at this very moment.
DO $$
DECLARE
    role text;
BEGIN
    FOREACH role IN ARRAY ARRAY['pgqueue_producer', 'pgqueue_worker', 'pgqueue_auditor', 'pgqueue_operator'] LOOP
        BEGIN
            IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            END IF;
        EXCEPTION
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN
                RAISE NOTICE 'pgqueue: this user may not create role %, so its grants are left out', role;
        END;
        CONTINUE WHEN NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role);
        EXECUTE format('GRANT USAGE ON SCHEMA pgqueue TO %I', role);
        CASE role
        WHEN 'pgqueue_producer' THEN
            EXECUTE format('GRANT INSERT (type, payload, queue, priority, run_at, thread_demand, max_attempts, timeout, '
                           'idempotency_key, tags, name), SELECT (id) ON pgqueue.jobs TO %I', role);
            EXECUTE format('GRANT USAGE ON SEQUENCE pgqueue.job_ids, pgqueue.ready TO %I', role);
            EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.add_job, pgqueue.assert_lease TO %I', role);
        WHEN 'pgqueue_worker' THEN
            EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.jobs, pgqueue.jobs_live, pgqueue.jobs_failed, '
                           'pgqueue.jobs_finished, pgqueue.attempts, pgqueue.workers, pgqueue.idempotency_keys TO %I', role);
            EXECUTE format('GRANT INSERT ON pgqueue.tallies TO %I', role);
            EXECUTE format('GRANT SELECT ON pgqueue.queues, pgqueue.drains, pgqueue.switches, pgqueue.audit TO %I', role);
            EXECUTE format('GRANT USAGE, SELECT ON SEQUENCE pgqueue.job_ids, pgqueue.ready, pgqueue.attempt_ids TO %I', role);
            EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.add_job, pgqueue.assert_lease, pgqueue.claim_jobs, '
                           'pgqueue.complete_jobs, pgqueue.wake, pgqueue.backlog, pgqueue.why, pgqueue.make_partitions, '
                           'pgqueue.drop_partitions, pgqueue.bucket, pgqueue.bounds TO %I', role);
        WHEN 'pgqueue_auditor' THEN
            EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA pgqueue TO %I', role);
            EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.why, pgqueue.backlog TO %I', role);
        WHEN 'pgqueue_operator' THEN
            EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA pgqueue TO %I', role);
            EXECUTE format('GRANT EXECUTE ON FUNCTION pgqueue.why, pgqueue.backlog, pgqueue.cancel_job, pgqueue.retry_job, '
                           'pgqueue.edit_job, pgqueue.pause_queue, pgqueue.resume_queue TO %I', role);
        END CASE;
        IF role <> 'pgqueue_producer' THEN
            EXECUTE format('GRANT SELECT ON pgqueue.alembic_version TO %I', role);
        END IF;
    END LOOP;
END $$;

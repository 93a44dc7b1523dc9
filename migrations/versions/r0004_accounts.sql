-- What the HTTP API keeps: accounts, revoked tokens, answers to repeated requests, described types.
-- A statement ends with a semicolon before an empty line; each is executed on its own.

CREATE TABLE pgqueue.types (
    name         text        PRIMARY KEY,
    queue        text        NOT NULL,
    schema       jsonb       NOT NULL,
    described_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON TABLE pgqueue.types IS 'The types that workers have described: the JSON Schema of their payloads.';

CREATE TABLE pgqueue.users (
    id            bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text        NOT NULL CHECK (name ~ '^[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}$'),
    password_hash text        NOT NULL,
    scopes        text[]      NOT NULL,
    queues        text[],
    created_at    timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON COLUMN pgqueue.users.password_hash IS 'argon2id.';

COMMENT ON COLUMN pgqueue.users.queues IS 'Patterns of the queues that this user is confined to; NULL is all of them.';

CREATE UNIQUE INDEX users_name ON pgqueue.users (lower(name));

-- A session is a family: the token that began it and those that followed. Only hashes are stored.
CREATE TABLE pgqueue.refresh_tokens (
    hash       bytea       PRIMARY KEY,
    family     uuid        NOT NULL,
    user_id    bigint      NOT NULL REFERENCES pgqueue.users ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    used_at    timestamptz
);

CREATE INDEX refresh_tokens_user ON pgqueue.refresh_tokens (user_id, family);

CREATE INDEX refresh_tokens_family ON pgqueue.refresh_tokens (family);

CREATE INDEX refresh_tokens_expiry ON pgqueue.refresh_tokens (expires_at);

CREATE TABLE pgqueue.revoked_tokens (
    jti        text        PRIMARY KEY CHECK (char_length(jti) BETWEEN 1 AND 255),
    expires_at timestamptz NOT NULL,
    revoked_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

COMMENT ON COLUMN pgqueue.revoked_tokens.jti IS 'The id of a token; or sub: and a subject, for all that it was given until then.';

CREATE INDEX revoked_tokens_expiry ON pgqueue.revoked_tokens (expires_at);

-- The first answer to a request with an Idempotency-Key, stored in the transaction that did what was asked.
CREATE TABLE pgqueue.http_answers (
    subject     text        NOT NULL,
    route       text        NOT NULL,
    key         text        NOT NULL,
    fingerprint bytea       NOT NULL,
    status      integer,
    body        text,
    location    text,
    expires_at  timestamptz NOT NULL,
    PRIMARY KEY (subject, route, key)
);

CREATE INDEX http_answers_expiry ON pgqueue.http_answers (expires_at);

-- completed, failed, cancelled -> gone, with its attempts and steps.
CREATE FUNCTION pgqueue.delete_job(job_id bigint, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

-- One action on many jobs. A job that does not allow it is told of and does not keep the others from it.
CREATE FUNCTION pgqueue.act_on_jobs(ids bigint[], action text, reason text DEFAULT NULL)
    RETURNS TABLE (id bigint, status text, problem text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms' AS $$
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

-- The worker learns of it with its next heartbeat, claims no more and ends when its jobs have.
CREATE FUNCTION pgqueue.drain_worker(worker_id uuid, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgqueue.workers w WHERE w.id = drain_worker.worker_id AND w.stopped_at IS NULL) THEN
        RAISE EXCEPTION 'worker % does not run', drain_worker.worker_id USING ERRCODE = 'PQ004';
    END IF;
    INSERT INTO pgqueue.drains VALUES (drain_worker.worker_id) ON CONFLICT DO NOTHING;
    PERFORM pgqueue.write_audit('drain', NULL, NULL, drain_worker.reason, jsonb_build_object('worker', drain_worker.worker_id));
END $$;

CREATE FUNCTION pgqueue.revoke_token(jti text, expires_at timestamptz, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO pgqueue.revoked_tokens (jti, expires_at) VALUES (revoke_token.jti, revoke_token.expires_at)
    ON CONFLICT ON CONSTRAINT revoked_tokens_pkey DO UPDATE
        SET expires_at = greatest(revoked_tokens.expires_at, excluded.expires_at), revoked_at = excluded.revoked_at;
    PERFORM pgqueue.write_audit('revoke_token', NULL, NULL, revoke_token.reason, jsonb_build_object('jti', revoke_token.jti));
END $$;

CREATE FUNCTION pgqueue.audit_access(action text, detail jsonb, reason text DEFAULT NULL) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF action NOT IN ('create_token', 'add_user', 'set_password', 'remove_user') THEN
        RAISE EXCEPTION 'pgqueue.audit_access: action must be create_token, add_user, set_password or remove_user'
            USING ERRCODE = 'check_violation', COLUMN = 'action';
    END IF;
    PERFORM pgqueue.write_audit(action, NULL, NULL, audit_access.reason, audit_access.detail);
END $$;

-- What is past its time, and nobody holds.
CREATE FUNCTION pgqueue.prune_access() RETURNS void LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM pgqueue.refresh_tokens t WHERE t.hash IN (
        SELECT e.hash FROM pgqueue.refresh_tokens e WHERE e.expires_at <= statement_timestamp() FOR UPDATE SKIP LOCKED);
    DELETE FROM pgqueue.revoked_tokens t WHERE t.jti IN (
        SELECT e.jti FROM pgqueue.revoked_tokens e WHERE e.expires_at <= statement_timestamp() FOR UPDATE SKIP LOCKED);
    DELETE FROM pgqueue.http_answers a WHERE (a.subject, a.route, a.key) IN (
        SELECT e.subject, e.route, e.key FROM pgqueue.http_answers e WHERE e.expires_at <= statement_timestamp()
        ORDER BY e.expires_at LIMIT 10000 FOR UPDATE SKIP LOCKED)
$$;

REVOKE ALL ON FUNCTION pgqueue.delete_job, pgqueue.act_on_jobs, pgqueue.drain_worker, pgqueue.revoke_token,
    pgqueue.audit_access, pgqueue.prune_access FROM PUBLIC;

-- pgqueue_api is what the HTTP API needs and no more: to add jobs, to read, to do what operators do, and its own tables.
DO $$
BEGIN
    BEGIN
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_api') THEN
            CREATE ROLE pgqueue_api NOLOGIN;
        END IF;
    EXCEPTION
        WHEN duplicate_object OR unique_violation THEN NULL;
        WHEN insufficient_privilege THEN
            RAISE NOTICE 'pgqueue: this user may not create role pgqueue_api, so its grants are left out';
    END;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_api') THEN
        GRANT USAGE ON SCHEMA pgqueue TO pgqueue_api;
        GRANT SELECT ON ALL TABLES IN SCHEMA pgqueue TO pgqueue_api;
        GRANT INSERT (type, payload, queue, priority, run_at, thread_demand, max_attempts, timeout, idempotency_key, tags, name)
            ON pgqueue.jobs TO pgqueue_api;
        GRANT USAGE ON SEQUENCE pgqueue.job_ids, pgqueue.ready TO pgqueue_api;
        GRANT INSERT, UPDATE, DELETE ON pgqueue.users, pgqueue.refresh_tokens, pgqueue.http_answers TO pgqueue_api;
        GRANT EXECUTE ON FUNCTION pgqueue.add_job, pgqueue.why, pgqueue.backlog, pgqueue.cancel_job, pgqueue.retry_job,
            pgqueue.edit_job, pgqueue.pause_queue, pgqueue.resume_queue, pgqueue.resolve_job, pgqueue.delete_job,
            pgqueue.act_on_jobs, pgqueue.drain_worker, pgqueue.revoke_token, pgqueue.audit_access TO pgqueue_api;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_worker') THEN
        GRANT SELECT, INSERT, UPDATE ON pgqueue.types TO pgqueue_worker;
        GRANT EXECUTE ON FUNCTION pgqueue.prune_access TO pgqueue_worker;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_auditor') THEN
        GRANT SELECT ON pgqueue.types TO pgqueue_auditor;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_operator') THEN
        GRANT SELECT ON pgqueue.types TO pgqueue_operator;
        GRANT EXECUTE ON FUNCTION pgqueue.delete_job, pgqueue.act_on_jobs, pgqueue.drain_worker TO pgqueue_operator;
    END IF;
END $$;

-- Effects: which one was begun or done under which key, so that it happens once.
-- A statement ends with a semicolon before an empty line; each is executed on its own.

CREATE TABLE pgqueue.effects (
    key         text        PRIMARY KEY,
    job_id      bigint      NOT NULL,
    lease_token uuid,
    begun_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    done_at     timestamptz,
    result      jsonb,
    expires_at  timestamptz NOT NULL
);

COMMENT ON TABLE pgqueue.effects IS 'One row per effect that must not happen twice: begun by which job, and done or not.';

COMMENT ON COLUMN pgqueue.effects.lease_token IS 'Of the attempt that began it.';

CREATE INDEX effects_expiry ON pgqueue.effects (expires_at);

CREATE INDEX effects_job ON pgqueue.effects (job_id);

-- Ends the doubt about a job that may or may not have had its effect: 'completed' if it had, 'retry' if it had not.
CREATE FUNCTION pgqueue.resolve_job(job_id bigint, outcome text, reason text DEFAULT NULL, result jsonb DEFAULT NULL)
    RETURNS pgqueue.status LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
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

REVOKE ALL ON FUNCTION pgqueue.resolve_job FROM PUBLIC;

DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_worker') THEN
        GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.effects TO pgqueue_worker;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_auditor') THEN
        GRANT SELECT ON pgqueue.effects TO pgqueue_auditor;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_operator') THEN
        GRANT SELECT ON pgqueue.effects TO pgqueue_operator;
        GRANT EXECUTE ON FUNCTION pgqueue.resolve_job TO pgqueue_operator;
    END IF;
END $$;

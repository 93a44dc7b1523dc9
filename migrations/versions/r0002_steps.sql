-- What finished parts of a job returned, so that a retry does only the rest.
-- A statement ends with a semicolon before an empty line; each is executed on its own.

CREATE TABLE pgqueue.steps (
    job_id     bigint      NOT NULL,
    name       text        NOT NULL,
    result     jsonb,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (job_id, name)
);

CREATE INDEX steps_age ON pgqueue.steps (created_at);

DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_worker') THEN
        GRANT SELECT, INSERT, UPDATE, DELETE ON pgqueue.steps TO pgqueue_worker;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_auditor') THEN
        GRANT SELECT ON pgqueue.steps TO pgqueue_auditor;
    END IF;
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'pgqueue_operator') THEN
        GRANT SELECT ON pgqueue.steps TO pgqueue_operator;
    END IF;
END $$;

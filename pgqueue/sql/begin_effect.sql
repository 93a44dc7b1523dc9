-- Takes the right to an effect for a running job, and says how the effect stands if another has it.
-- One that is done and past its time may be done anew; one whose job is gone may be taken over, unless it must not happen
-- twice: then nobody knows whether it happened. A job that began after this statement did is gone only to its snapshot.
WITH lease AS MATERIALIZED (
    SELECT j.id FROM pgqueue.jobs_live j WHERE j.id = %(id)s AND j.lease_token = %(lease_token)s::uuid
      AND (SELECT set_config('lock_timeout', '500ms', true)) IS NOT NULL FOR UPDATE
), taken AS (
    INSERT INTO pgqueue.effects AS e (key, job_id, lease_token, expires_at)
    SELECT %(key)s, l.id, %(lease_token)s::uuid, clock_timestamp() + make_interval(secs => %(ttl)s) FROM lease l
    ON CONFLICT (key) DO UPDATE
        SET job_id = excluded.job_id, begun_at = excluded.begun_at,
            lease_token = CASE WHEN e.done_at IS NULL AND %(at_most_once)s THEN NULL ELSE excluded.lease_token END,
            expires_at = excluded.expires_at, done_at = NULL, result = NULL
        WHERE e.done_at IS NOT NULL AND e.expires_at <= clock_timestamp()
           OR e.done_at IS NULL AND e.job_id <> excluded.job_id AND e.begun_at < statement_timestamp()
              AND NOT EXISTS (SELECT FROM pgqueue.jobs_live j WHERE j.id = e.job_id)
              AND NOT (%(at_most_once)s AND EXISTS (SELECT FROM pgqueue.jobs_failed j WHERE j.id = e.job_id AND j.reason = 'in_doubt'))
    RETURNING e.lease_token IS NOT NULL AS anew
)
SELECT EXISTS (SELECT FROM lease) AS leased, (SELECT anew FROM taken) AS taken, e.job_id, e.done_at IS NOT NULL AS done,
       EXISTS (SELECT FROM pgqueue.jobs_live j WHERE j.id = e.job_id) AS alive
FROM (VALUES (1)) one LEFT JOIN pgqueue.effects e ON e.key = %(key)s

-- running -> scheduled, uncharged; those that were asked to stop are left out
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
WITH asked AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(delays)s::float8[]) AS a(id, lease_token, delay)
), owned AS MATERIALIZED (
    SELECT j.id, a.delay
    FROM (SELECT * FROM asked ORDER BY id) a
    CROSS JOIN LATERAL (
        SELECT j.id FROM pgqueue.jobs_live j
        WHERE j.id = a.id AND j.lease_token = a.lease_token AND j.cancel_requested_at IS NULL FOR UPDATE
    ) j
    WHERE (SELECT set_config('lock_timeout', coalesce(%(patience)s::text, current_setting('lock_timeout')), true)) IS NOT NULL
)
UPDATE pgqueue.jobs_live j
SET status = 'scheduled', run_at = statement_timestamp() + make_interval(secs => o.delay), worker_id = NULL, lease_token = NULL
FROM owned o WHERE j.id = ANY (ARRAY[o.id])
RETURNING j.id

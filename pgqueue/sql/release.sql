-- running -> pending, uncharged: the worker gives back what it does not run; those that were asked to stop are left out
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
WITH given AS (
    SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) AS g(id, lease_token)
), owned AS MATERIALIZED (
    SELECT j.id
    FROM (SELECT * FROM given ORDER BY id) g
    CROSS JOIN LATERAL (
        SELECT j.id FROM pgqueue.jobs_live j
        WHERE j.id = g.id AND j.lease_token = g.lease_token AND j.cancel_requested_at IS NULL FOR UPDATE
    ) j
    WHERE (SELECT set_config('lock_timeout', coalesce(%(patience)s::text, current_setting('lock_timeout')), true)) IS NOT NULL
)
UPDATE pgqueue.jobs_live j
SET status = 'pending', seq = nextval('pgqueue.ready'), worker_id = NULL, lease_token = NULL, started_at = NULL,
    threads_used = NULL
FROM owned o WHERE j.id = ANY (ARRAY[o.id])
RETURNING j.id, j.queue, j.type, j.thread_demand

-- scheduled -> pending, when due, in the order in which they were due
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
WITH due AS MATERIALIZED (
    SELECT j.id, j.run_at FROM pgqueue.jobs_live j
    WHERE j.status = 'scheduled' AND j.run_at <= statement_timestamp() AND j.run_at >= %(floor)s
    ORDER BY j.run_at, j.id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
), placed AS MATERIALIZED (
    SELECT d.id, nextval('pgqueue.ready') AS seq FROM (SELECT id FROM due ORDER BY run_at, id) d
), ready AS (
    UPDATE pgqueue.jobs_live j SET status = 'pending', seq = p.seq
    FROM placed p WHERE j.id = ANY (ARRAY[p.id])
    RETURNING j.queue, j.type, j.thread_demand, j.run_at
)
SELECT count(*) AS promoted, max(run_at) AS last, array_agg(queue) AS queues, array_agg(type) AS types,
       array_agg(thread_demand) AS demands
FROM ready

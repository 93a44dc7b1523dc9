-- running -> pending, when no live worker owns it; -> failed as poison after too many losses; -> cancelled if asked to stop,
-- unless it began an effect: then the next attempt finds out whether that is in doubt. Poison whose id is in the dead letter
-- queue already has no place there, and is cancelled: it must not stop the rescue of all others.
-- The gaps between the ids of the live workers hold exactly the jobs of all others, known or not.
-- now() and not statement_timestamp(): where transactions are REPEATABLE READ by default, the snapshot is as old as the
-- transaction, and a statement that waited for a lock would miss the heartbeats of all that time.
-- A job's second loss makes it a suspect. Suspects run alone and say so (start.sql): only the one that ran is charged. It is
-- poison, unless the worker had taken jobs since: a long one may have met somebody else's poison. Not for ever: thrice as
-- many losses are proof enough.
-- ANY (ARRAY[id]) pins the join to the primary key: it cannot be hashed or merged, whatever the planner believes.
WITH live AS MATERIALIZED (
    SELECT w.id FROM pgqueue.workers w WHERE w.expires_at > now() AND w.stopped_at IS NULL
), gap AS MATERIALIZED (
    SELECT lag(b.id) OVER (ORDER BY b.id) AS low, b.id AS high
    FROM (SELECT id FROM live
          UNION ALL VALUES ('00000000-0000-0000-0000-000000000000'::uuid), ('ffffffff-ffff-ffff-ffff-ffffffffffff')) b
), orphan AS MATERIALIZED (
    SELECT o.* FROM gap g
    CROSS JOIN LATERAL (
        SELECT j.id, j.queue, j.type, j.worker_id, j.lease_token, j.attempt, j.lost, j.started_at, j.threads_used,
               j.cancel_requested_at
        FROM pgqueue.jobs_live j
        WHERE j.status = 'running' AND j.worker_id > g.low AND j.worker_id < g.high
        ORDER BY j.worker_id
        LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED
    ) o
    WHERE g.low IS NOT NULL
    LIMIT %(limit)s
), judged AS MATERIALIZED (
    -- The locked row is the newest, the other is as old as what we know of the workers. If their leases differ, the job was
    -- claimed since then, perhaps by a worker that is as new.
    SELECT o.id, o.queue, o.type, o.worker_id, least(o.attempt, 2147483646) + 1 AS attempt,
           least(o.started_at, statement_timestamp()) AS started_at,  -- the clock may have been set back
           l.lost,
           CASE WHEN o.cancel_requested_at IS NOT NULL
                     AND NOT EXISTS (SELECT FROM pgqueue.effects e WHERE e.job_id = o.id AND e.done_at IS NULL) THEN 'cancelled'
                WHEN l.lost < %(max_lost)s OR o.threads_used IS NULL THEN 'retried'
                WHEN l.lost < 3 * %(max_lost)s AND EXISTS (
                    SELECT FROM orphan b
                    WHERE b.worker_id = o.worker_id AND b.started_at > o.started_at + make_interval(secs => %(beside)s)
                ) THEN 'retried'
                WHEN (SELECT true FROM pgqueue.jobs_failed f WHERE f.id = o.id LIMIT 1) THEN 'cancelled'
                ELSE 'failed' END AS outcome
    FROM orphan o
    -- Bounded: one row with an absurd number must not stop the rescue of all others.
    CROSS JOIN LATERAL (SELECT least(o.lost, 1000000) + (o.lost <= 1 OR o.threads_used IS NOT NULL)::int AS lost) l
    CROSS JOIN LATERAL (SELECT FROM pgqueue.jobs_live j WHERE j.id = o.id AND j.lease_token = o.lease_token LIMIT 1) j
), again AS (
    UPDATE pgqueue.jobs_live j
    SET status = 'pending', seq = nextval('pgqueue.ready'), lost = o.lost, worker_id = NULL, lease_token = NULL,
        started_at = NULL, threads_used = NULL
    FROM judged o WHERE j.id = ANY (ARRAY[o.id]) AND o.outcome = 'retried'
    RETURNING j.queue, j.type, j.thread_demand
), gone AS (
    DELETE FROM pgqueue.jobs_live j USING judged o WHERE j.id = ANY (ARRAY[o.id]) AND o.outcome <> 'retried'
    RETURNING j.*, o.outcome, o.lost AS losses
), ended AS (
    -- Without the lease_token: it was not its holder who ended it.
    INSERT INTO pgqueue.jobs (id, queue, type, name, payload, status, priority, seq, run_at, thread_demand, timeout,
        max_attempts, attempt, lost, idempotency_key, tags, created_at, worker_id, threads_used, started_at,
        cancel_requested_at, progress, finished_at, reason, error_type, error)
    SELECT id, queue, type, name, payload, outcome::pgqueue.status, priority, seq, run_at, thread_demand, timeout,
        max_attempts, attempt, losses, idempotency_key, tags, created_at, worker_id, threads_used,
        least(started_at, statement_timestamp()), cancel_requested_at, progress, statement_timestamp(),
        CASE outcome WHEN 'failed' THEN 'poison' ELSE 'cancelled' END,
        CASE WHEN losses >= %(max_lost)s THEN 'WorkerLost' END,
        CASE WHEN losses >= %(max_lost)s THEN format('%%s workers died while they ran this job', losses) END
    FROM gone
), counted AS (
    INSERT INTO pgqueue.tallies (event, queue, type, reason, attempt, jobs)
    SELECT outcome, queue, type, 'worker_lost', lost, count(*) FROM judged GROUP BY 1, 2, 3, 5
    UNION ALL
    SELECT 'exhausted', queue, type, NULL, lost, count(*) FROM judged WHERE outcome = 'failed' GROUP BY 2, 3, 5
), history AS (
    INSERT INTO pgqueue.attempts (job_id, attempt, outcome, reason, error_type, error, worker_id, started_at)
    SELECT id, attempt, outcome, 'worker_lost', 'WorkerLost', 'the worker stopped sending heartbeats', worker_id, started_at
    FROM judged
)
SELECT (SELECT count(*) FROM judged) AS rescued, (SELECT count(*) FROM judged WHERE outcome = 'failed') AS poisoned,
       a.queues, a.types, a.demands
FROM (SELECT array_agg(queue) AS queues, array_agg(type) AS types, array_agg(thread_demand) AS demands FROM again) a

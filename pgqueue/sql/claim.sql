-- pending -> running, in the lanes that the worker knows, each from its floor on.
-- The commit does not wait for the disk: a claim that a crash takes back is refused by its token.
SELECT c.id, c.queue, c.type, c.payload, c.priority, c.seq, c.thread_demand, c.timeout, c.max_attempts, c.attempt, c.lost,
    c.idempotency_key, c.created, c.parked
FROM (SELECT set_config('synchronous_commit', 'off', true)) undurable
CROSS JOIN LATERAL pgqueue.claim_jobs(
    %(queues)s::text[], %(priorities)s::int[], %(floors)s::bigint[], %(types)s::text[], %(threads)s::int,
    %(limit)s::int, %(worker_id)s::uuid, %(lease_token)s::uuid) c

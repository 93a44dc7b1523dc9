-- Which of these leases ended with this very token, so that a finish whose answer was lost is not taken for a lost lease.
-- The LATERAL looks each of them up by its id: history is too long to be scanned.
SELECT o.id FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) AS o(id, lease_token)
CROSS JOIN LATERAL (
    SELECT FROM pgqueue.jobs j
    WHERE j.id = o.id AND j.lease_token = o.lease_token AND j.status IN ('completed', 'failed', 'cancelled')
    LIMIT 1
) j

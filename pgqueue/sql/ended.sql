-- Which of these leases ended with this very token, so that a finish whose answer was lost is not taken for a lost lease.
SELECT j.id FROM pgqueue.jobs j
JOIN unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) AS o(id, lease_token) USING (id)
WHERE j.lease_token = o.lease_token AND j.status IN ('completed', 'failed', 'cancelled')

-- Which of these leases still stand; unlike owned.sql it waits for nobody.
SELECT o.id FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) AS o(id, lease_token)
CROSS JOIN LATERAL (
    SELECT FROM pgqueue.jobs_live j WHERE j.id = ANY (ARRAY[o.id]) AND j.lease_token = o.lease_token LIMIT 1
) j

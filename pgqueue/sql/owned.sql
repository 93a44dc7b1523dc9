-- Which of these leases still stand. The lock waits for a commit that is under way, so the answer is never a guess.
SELECT o.id
FROM (SELECT * FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[]) AS o(id, lease_token) ORDER BY id) o
CROSS JOIN LATERAL (
    SELECT FROM pgqueue.jobs_live j WHERE j.id = o.id AND j.lease_token = o.lease_token FOR UPDATE
) j

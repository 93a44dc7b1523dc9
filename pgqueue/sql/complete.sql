-- running -> completed; the ids of those whose lease is lost
SELECT id FROM pgqueue.complete_jobs(
    %(ids)s::bigint[], %(tokens)s::uuid[], %(results)s::jsonb[], %(threads)s::int[], %(started_ago)s::float8[],
    %(ended_ago)s::float8[], %(patience)s::text) AS c(id)

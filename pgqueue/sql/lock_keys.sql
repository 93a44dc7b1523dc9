-- Batches that name the same keys come one after the other, in whatever order they name them.
SELECT pg_advisory_xact_lock(1885827430, k.hash)
FROM (SELECT DISTINCT hashtext(k) AS hash FROM unnest(%(keys)s::text[]) AS k ORDER BY 1) k

-- Written only where something changed: many workers start at the same time, with the same types.
INSERT INTO pgqueue.types AS t (name, queue, schema)
SELECT d.name, d.queue, d.schema
FROM unnest(%(names)s::text[], %(queues)s::text[], %(schemas)s::jsonb[]) AS d(name, queue, schema)
ORDER BY d.name
ON CONFLICT (name) DO UPDATE SET queue = excluded.queue, schema = excluded.schema, described_at = clock_timestamp()
    WHERE (t.queue, t.schema) IS DISTINCT FROM (excluded.queue, excluded.schema)

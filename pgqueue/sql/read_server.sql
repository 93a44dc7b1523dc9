-- How PostgreSQL does with our tables. Partitions count as what they are parts of.
SELECT regexp_replace(s.relname, '_(default|[0-9]+)$', '') AS name, sum(pg_total_relation_size(s.relid))::float8 AS bytes,
       sum(s.n_dead_tup)::float8 AS dead,
       pg_notification_queue_usage() AS notify_queue
FROM pg_stat_user_tables s
WHERE s.schemaname = 'pgqueue'
GROUP BY 1
ORDER BY 1

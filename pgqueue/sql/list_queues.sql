SELECT s.queue, s.paused, s.paused_by, s.paused_because, s.pending, s.scheduled, s.running, s.failed,
       extract(epoch FROM s.oldest_wait)::float8 AS oldest_wait
FROM pgqueue.queue_stats s
WHERE (%(queues)s::text[] IS NULL OR s.queue LIKE ANY (%(queues)s::text[]))
ORDER BY s.queue

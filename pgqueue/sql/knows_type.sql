SELECT EXISTS (
    SELECT FROM pgqueue.workers w
    WHERE w.expires_at > statement_timestamp() AND w.stopped_at IS NULL AND (w.types IS NULL OR %(type)s::text = ANY (w.types))
)

UPDATE pgqueue.refresh_tokens t SET used_at = clock_timestamp() WHERE t.hash = %(hash)s

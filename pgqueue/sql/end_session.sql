DELETE FROM pgqueue.refresh_tokens t WHERE t.family = %(family)s

DELETE FROM pgqueue.refresh_tokens t WHERE t.user_id = %(user_id)s

-- In the transaction that ends an attempt of which it is known that it had no effect.
DELETE FROM pgqueue.effects WHERE key = %(key)s AND job_id = %(id)s AND done_at IS NULL

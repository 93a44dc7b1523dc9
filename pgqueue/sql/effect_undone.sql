-- In the transaction that ends an attempt of which it is known that it had no effect.
-- What must not happen twice is undone only by the attempt that began it: of an earlier one nobody knows.
DELETE FROM pgqueue.effects
WHERE key = %(key)s AND job_id = %(id)s AND done_at IS NULL AND (lease_token = %(lease_token)s::uuid OR NOT %(at_most_once)s)

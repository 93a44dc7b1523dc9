SELECT pgqueue.revoke_token(%(jti)s, %(expires_at)s, %(reason)s)

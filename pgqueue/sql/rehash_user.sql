UPDATE pgqueue.users u SET password_hash = %(password_hash)s WHERE u.id = %(id)s

SELECT FROM pgqueue.users u WHERE u.id = %(id)s FOR UPDATE

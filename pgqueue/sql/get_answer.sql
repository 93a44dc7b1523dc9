SELECT a.fingerprint, a.status, a.body, a.location FROM pgqueue.http_answers a
WHERE a.subject = %(subject)s AND a.route = %(route)s AND a.key = %(key)s

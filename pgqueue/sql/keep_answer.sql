UPDATE pgqueue.http_answers a SET status = %(status)s, body = %(body)s, location = %(location)s
WHERE a.subject = %(subject)s AND a.route = %(route)s AND a.key = %(key)s

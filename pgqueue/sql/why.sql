SELECT blocking, reason, detail FROM pgqueue.why(%(id)s)

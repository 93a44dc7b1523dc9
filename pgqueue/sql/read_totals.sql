SELECT t.name, t.queue, t.type, t.label, t.bucket, t.value FROM pgqueue.totals t

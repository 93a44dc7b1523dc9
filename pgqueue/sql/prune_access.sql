SELECT pgqueue.prune_access()

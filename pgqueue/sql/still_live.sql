SELECT j.id FROM pgqueue.jobs_live j WHERE j.id = ANY (%(ids)s::bigint[])

"""Resolution of a job or a hostfile to endpoints: addresses, keys, probes, limits, prices."""

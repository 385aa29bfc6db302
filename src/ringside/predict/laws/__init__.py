"""What measured tables show beyond their rows: fitted laws with error bars.

bumps      What times have beside a law's curve: bumps, jumps at named switches, and what other tables show of them
calibrate  A curve fitted to measured rows: physics first, then what the rows show beyond it, and how sure that is; what
           one scale of a cluster tells of another
fabric     What an all-reduce costs on a cluster, from what the cluster is made of: base cost, hops, and the narrowest
           way; the time over the size: latency, pipeline fill, bandwidth
knowledge  What is known of a table before its figures: the law of its hardware, from words, presets, point-to-point
           tables
mpi        What an all-reduce costs among processes on CPUs, from what a message between two of them costs
nccl       What NCCL's own tuner computes: its constants as seconds, and at which sizes it changes its protocol
"""

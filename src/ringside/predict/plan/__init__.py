"""The answer for somebody's plan: step time, options, band, and why.

bound           What bounds a collective: which figure of the topology its time follows, latency or bandwidth, of which
                links
buckets         How gradients are best cut into buckets: what of their synchronisation backward hides, and what is left
                exposed
measured        What a run measured moves what is expected of the same hardware: all of its ways, alike
memory          Whether a model's state fits in a rank's memory, plain or sharded, with the arithmetic
options         What an all-reduce may be done with on a topology, each way with its price, its band, and what supports
                it
plan            What synchronising gradients would cost on a topology, as one plain value: `plan(Question(...))` ->
                `Plan`
ranking         Which algorithm is fastest at which size, and where one overtakes another
simulated_band  How sure a simulation is: the band of clusters that are like its topology
"""

"""The answer for somebody's plan: step time, options, band, and why.

advice   What to make of a plan: how many hosts are worth it, and what would help most
buckets  How gradients are best cut into buckets: what of their synchronisation backward hides, and what is left exposed
memory   Whether a model's state fits in a rank's memory, plain or sharded, with the arithmetic
options  What an all-reduce may be done with on a topology, each way with its price, its band, what supports it, and how
         what a run measured moves it
plan     What synchronising gradients would cost on a topology, as one plain value: `plan(PlanQuestion(...))` ->
         `TrainingPlan`; which way is fastest at which size, and which figure of the topology its time follows
step     How long a training step takes: what a rank computes and what it waits for, played one after the other
"""

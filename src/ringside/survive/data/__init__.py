"""Which samples a step has, whoever is there.

micro_batches  A worker's own work: gradients of micro-batches, as sums in memory that is given, and the optimizer's
               step
rebalance      What to do about a rank that takes longer: tell, give it fewer micro-batches, or go on without it
samples        Which samples a step takes: from (seed, epoch, step) alone, never from the number of ranks; samplers of
               PyTorch as orders, and where a job is in its samples
"""

"""Which samples a step has, whoever is there.

micro_batches  A worker's own work: gradients of micro-batches, as sums in memory that is given, and the optimizer's
               step
position       Where a job is in its samples: what a checkpoint says of that, and who may go on from it
rebalance      What to do about a rank that takes longer: tell, give it fewer micro-batches, or go on without it
samplers       Samplers of PyTorch as orders: functions of the epoch and the seed, alike on all ranks and in every
               process
samples        Which samples a step takes: from (seed, epoch, step) alone, never from the number of ranks
"""

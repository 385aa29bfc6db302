"""`init_process_group("ringside")`: a process group of torch.distributed.

arguments         What a call of a process group's method says: torch gives most of them two signatures, with and
                  without options
collectives       What every collective of torch.distributed is in terms of a communicator
counters          Who carried the collectives of a process group: counted, so that nothing falls through to another
                  engine unseen
creation          Makes a process group for torch.distributed, which calls this on every rank of it
ddp_buckets       DDP's buckets, reduced where they lie: the ranks of a host map each other's after the first step
group             The process group that `init_process_group("ringside")` makes: CPU tensors are ours, all others the
                  native one's
list_collectives  Collectives of lists of tensors, one for every rank, in terms of a communicator
queue             The engine of one process group: its communicator, and the order in which collectives are carried out
tensors           Tensors of the process group as the engine takes them: one dimension, contiguous, of numbers it can
                  add up
torch_patches     Parts of torch that know their own backends by name, changed once so that they know groups of ours as
                  well
work              What a collective of the process group gives back: torch's Work and Future, and no way to fail but an
                  exception
"""

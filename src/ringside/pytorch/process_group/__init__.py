"""`init_process_group("ringside")`: a process group of torch.distributed.

arguments    What a call of a process group's method says, and its tensors as the engine takes them
backend      From torch 2.14 on: a backend of c10d's for the CPU tensors of a group of torch's own
carrier      What a process group of ours carries, whichever class torch knows it by
collectives  What every collective of torch.distributed is in terms of a communicator
counters     Who carried the collectives of a process group: counted, so that nothing falls through to another engine
             unseen
creation     Makes a process group for torch.distributed, and changes the parts of torch that know backends by name
engine       The engine of one process group: its communicator, the queue of its collectives, and DDP's buckets where
             they lie
group        Up to torch 2.13: a whole process group; CPU tensors are ours, all others the native one's
work         What a collective of the process group gives back: torch's Work and Future, and no way to fail but an
             exception
"""

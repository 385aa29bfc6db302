"""`init_process_group("ringside")`: a process group of torch.distributed.

arguments    What a call of a process group's method says, and its tensors as the engine takes them
backend      What torch knows ours by: up to 2.13 a whole process group, from 2.14 on a backend of c10d's for the CPU
             tensors of a group of torch's own
carrier      What a process group of ours carries, whichever class torch knows it by, and which engine ran how much
collectives  What every collective of torch.distributed is in terms of a communicator
creation     Makes a process group for torch.distributed, and changes the parts of torch that know backends by name
engine       The engine of one process group: its communicator, the queue of its collectives, and DDP's buckets where
             they lie
work         What a collective of the process group gives back: torch's Work and Future, and no way to fail but an
             exception
"""

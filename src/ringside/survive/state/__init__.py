"""The training state: packed, sent to who joins, kept, written to checkpoints.

checkpoint        Checkpoints in the format of torch.distributed.checkpoint: of committed steps only, written whole or
                  not at all
final             The final state of a job: kept by a worker in its keeper's memory, taken from there, and read from a
                  file
kept              Memory of a keeper that its worker writes: how far the worker has come, and the final state once there
                  is one
state             What moves together: parameters, buffers, optimizer, scheduler and the step
torch_checkpoint  A directory of torch.distributed.checkpoint: written by DCP itself, read without running anything that
                  lies in it
transfer          State changes hands: a member offers it to those who join, and a joiner takes it over, checked by its
                  digest
"""

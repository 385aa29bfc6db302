"""A process group of ours, in a script that just ends."""

from __future__ import annotations

import os
import sys

import ringside  # noqa: F401 - before torch, as a sorted list of imports has it

# isort: split
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("ringside", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(3))
works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
if rank == 0:  # nobody else calls this one, and nobody waits for it
    last = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda future: future.value())
print("end of script")

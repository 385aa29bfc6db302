"""Between two hosts: a script that ends while a communicator is open, in the way that is named."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import ringside

path, end = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
kept = ringside.communicator(machine=f"host {rank}", algorithm="ring", timeout=20)
x = torch.ones(1000)
kept.all_reduce(x)
kept.all_reduce(x, algorithm="native")
work = kept.all_reduce(x, async_op=True)
if end != "at once":
    work.wait()
if end == "without its group":
    dist.destroy_process_group()
if end == "forgotten":
    del kept
print("end", flush=True)

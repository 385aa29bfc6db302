"""Trains until the way was decided anew, which our engine does a few steps after a link has become slow."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.pytorch.ddp.attached_model import own_hook

dist.init_process_group("gloo")
ddp = DistributedDataParallel(nn.Linear(1024, 1024), gradient_as_bucket_view=True)
attachment = ringside.attach(ddp, engine="ringside", run_dir=os.environ["OUT"])
comm = own_hook(ddp).reducer.communicator
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
going, step, settled_at = torch.ones(1), 0, 0
while going:
    optimizer.zero_grad()
    ddp(torch.randn(8, 1024)).square().mean().backward()
    optimizer.step()
    step += 1
    if not settled_at and (step == 60 or comm.settled(4 * 1024 * 1025)):  # or what is left is tried rarely
        settled_at = step
    if settled_at and step == settled_at + 12 and dist.get_rank() == 0:
        Path(os.environ["SETTLED"]).touch()
    if step % 5 == 0:
        going[0] = float(step < 400 and not comm.revisions)
        dist.broadcast(going, 0)
attachment.session.end()
dist.destroy_process_group()

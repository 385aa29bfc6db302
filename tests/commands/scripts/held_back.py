"""Trains while rank 1 is in a group of processes whose time is limited, until that was named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel as DDP

from ringside.demo.train import Agreement
from ringside.pytorch.recording import session as sessions


class Works(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x):
        time.sleep(0.03)  # most of the step needs no CPU: other people's load disturbs little
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            sum(range(1000))
        return self.inner(x)


def decide():
    found = [verdict for verdict in session.verdicts if verdict.ranks == [1] and verdict.detected_step > BEGIN]
    return min((verdict.detected_step for verdict in found), default=LIMIT) + 8


BEGIN, LIMIT = int(os.environ["BEGIN"]), 88
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(Works())
session = sessions.current()
store = PrefixStore("test", dist.distributed_c10d._get_default_store())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
agreement = Agreement(store, rank, LIMIT, decide)
step = 0
while agreement.goes_on(step):
    if rank == 1 and step == BEGIN:
        Path(os.environ["HELD_IN"]).write_text(str(os.getpid()))
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
if rank == 1:
    Path(os.environ["FREE_IN"]).write_text(str(os.getpid()))
session.end()
dist.destroy_process_group()

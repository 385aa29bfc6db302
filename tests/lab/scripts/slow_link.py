"""Trains until a verdict is over, or for so many steps."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.pytorch.recording import session as sessions
from ringside.pytorch.recording.session import RecordingSettings

dist.init_process_group("gloo")
rank = dist.get_rank()
model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
model[0].register_forward_hook(lambda *_: time.sleep(0.04))  # so much computing
ddp = DistributedDataParallel(model)
# Periods a third as long as usual: the same number of them in a third of the time.
session = sessions.begin(os.environ["OUT"], os.environ["ENGINE"], RecordingSettings(links_s=0.3))
ringside.attach(ddp, engine=os.environ["ENGINE"])
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
going, step, limit, late = torch.ones(1), 0, int(os.environ["STEPS"]), int(os.environ["STEPS"])
while going:
    optimizer.zero_grad()
    ddp(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        over = any("until_step" in verdict.evidence for verdict in session.verdicts)
        going[0] = float(step < limit and not over)
        dist.broadcast(going, 0)
session.end()
dist.destroy_process_group()

"""Trains three steps and tells who carried them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringside

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 4))
attachment = ringside.attach(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("ENGINE", attachment.engine, dict(attachment.counters))
attachment.session.end()
dist.destroy_process_group()

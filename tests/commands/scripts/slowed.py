"""Trains while rank 1 is slow, until that was named and is over; keeps what the metrics page said of both."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.nn.parallel import DistributedDataParallel as DDP

from ringside.demo.train import Agreement
from ringside.faults.inject import inject, parse_fault
from ringside.pytorch.recording import session as sessions


class Sleepy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)

    def forward(self, x):
        time.sleep(0.016)
        return self.inner(x)


def burn(seconds):
    began = time.perf_counter()
    time.sleep(seconds)
    return time.perf_counter() - began


def keep(name):
    first = json.loads((session.path / "events.jsonl").read_text().splitlines()[0])
    page = urllib.request.urlopen(first["metrics"], timeout=20).read()
    Path(os.environ["PAGES"], name).write_bytes(page)


def decide():
    # On a machine that does other things too, a rank may well be slow before it is made to.
    found = [v for v in session.verdicts if v.ranks == [1] and v.since_step > 60 and v.excess_ratio > 0.5]
    if found and not store.check(["healed"]):
        keep("firing.txt")
        store.set("healed", "1")
    if any("until_step" in v.evidence for v in found):
        keep("over.txt")
        return 0
    return LIMIT


LIMIT = 800
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DDP(Sleepy())
session = sessions.current()
store = PrefixStore("test", dist.distributed_c10d._get_default_store())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
injector = inject(parse_fault("slow:rank=1,factor=3,from_step=80"), model, rank, burn=burn)
agreement = Agreement(store, rank, LIMIT, decide)
step = 0
while agreement.goes_on(step):
    injector.step(step)
    if rank == 1 and step > 80 and store.check(["healed"]):
        injector.remove()
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
dist.destroy_process_group()

"""One rank of a small Gloo job under torch.profiler."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from tests.support.ranks import place
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

from ringside.faults.inject import inject, parse_fault


def train_and_record(folder: Path, steps: int, fault: str) -> None:
    """Train a small model on Gloo with a fault, and leave this rank's trace of some steps in a folder."""
    rank, world = place().rank, place().size
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    injector = inject(parse_fault(fault, world), model, rank)
    path = folder / f"trace_{rank}.json{'.gz' if rank else ''}"
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=2, active=steps),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        record_shapes=True,
    ) as profiler:
        for step in range(steps + 2):
            injector.step(step)
            optimizer.zero_grad()
            model(torch.randn(128, 256)).square().mean().backward()
            optimizer.step()
            profiler.step()

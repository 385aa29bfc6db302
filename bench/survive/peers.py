"""The peers of bench/survive/, started by torchrun: the demo's GPT over Gloo, and restarts from checkpoints."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.survive.counting import Counting, consumed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from ringside.demo.corpus import Corpus
from ringside.demo.model import SIZES, ByteGPT
from ringside.demo.survive import Windows
from ringside.demo.train import make_optimizer

KILLED_IN = 20  # the step in which rank 1 kills itself


def ddp(steps: int) -> None:
    """Print rank 0's seconds per DDP step of the demo's GPT."""
    size, rank = SIZES["small"], dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT(size))
    optimizer, seconds = make_optimizer(model), []
    dataset = Windows(Corpus(None, 0, 1, size.context), size.context)
    for step in range(steps):
        began = time.perf_counter()
        first = (2 * step + rank) * size.batch
        optimizer.zero_grad()
        model(torch.stack([dataset[first + at] for at in range(size.batch)])).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps(seconds[steps // 3 :]), flush=True)


def restart(directory: Path) -> None:
    """Train with a checkpoint of every step; rank 1 kills itself once; the next new step's time is written down."""
    rank, path = dist.get_rank(), directory / "checkpoint"
    model = DistributedDataParallel(Counting())
    first = int(torch.load(path)["step"]) + 1 if path.exists() else 0
    if first:
        model.module.load_state_dict(torch.load(path)["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(first, KILLED_IN + 5):
        optimizer.zero_grad()
        consumed(model.module, torch.arange(24)).backward()
        if step == KILLED_IN and rank == 1 and not (directory / "killed").exists():
            (directory / "killed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(model.module.counts.grad)
        optimizer.step()
        if rank == 0:
            torch.save({"step": step, "model": model.module.state_dict()}, f"{path}.new")
            os.replace(f"{path}.new", path)
        if step == KILLED_IN:
            (directory / f"healed-{rank}").write_text(str(time.monotonic()))


if __name__ == "__main__":
    job, own, size = next(rendezvous("env://"))
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]  # or a restarted job meets the addresses of the dead
    dist.init_process_group("gloo", store=PrefixStore(f"attempt-{attempt}", job), rank=own, world_size=size)
    torch.set_num_threads(1)
    if sys.argv[1] == "ddp":
        ddp(int(sys.argv[2]))
    else:
        restart(Path(sys.argv[2]))
    dist.destroy_process_group()

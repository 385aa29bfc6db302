"""Trains ten steps and ends in the way that is named."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading

LATE_S = 8.0
"""How late a rank is that another one does not wait for: that one has been told to end twice by then."""

port, path, way, *words = sys.argv[1:]
os.environ["MASTER_PORT"] = port
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402

dist.init_process_group("gloo")
rank = dist.get_rank()
ddp = DistributedDataParallel(nn.Linear(8, 8))
session = ringside.attach(ddp, run_dir=path).session
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)


def train(steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(2, 8)).sum().backward()
        optimizer.step()


def loses_a_rank() -> None:
    try:
        train(50)
    except ringside.PeerLostError as error:
        print("lost", error.ranks, flush=True)


def is_killed(victim: int) -> None:
    if rank == 0:
        steps = session.path / "steps.jsonl"
        while steps.read_text().count("\n") < 10:
            threading.Event().wait(0.02)  # a file that grows gives no event to wait for
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    loses_a_rank()


def raises() -> None:
    if rank == 1:
        ddp.module.register_forward_pre_hook(lambda *_: [][1])
    loses_a_rank()


def is_interrupted() -> None:
    if rank == 1:
        store = dist.distributed_c10d._get_default_store()

        def late(*_: object) -> None:
            with contextlib.suppress(RuntimeError):  # rank 0 ended, and its store with it
                store.wait(["never"], datetime.timedelta(seconds=LATE_S))

        ddp.module.register_forward_pre_hook(late)
    else:
        for seconds in (0.5, 1.5):  # the first waits for the others, the second does not
            threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    try:
        train(50)
    except (KeyboardInterrupt, ringside.PeerLostError) as error:
        print("ended by", type(error).__name__, flush=True)


train(10)
if way == "group":
    dist.destroy_process_group()
elif way == "session, group":
    session.end()
    dist.destroy_process_group()
elif way == "killed":
    is_killed(int(words[0]))
elif way == "raises":
    raises()
elif way == "interrupted":
    is_interrupted()
else:
    assert way == "nothing", way

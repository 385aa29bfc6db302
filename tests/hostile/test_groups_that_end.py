"""A script that ends soon after its last backward: Gloo's threads may still be letting go of our callbacks."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.training import ddp_ranks  # noqa: E402
from tests.support.ranks import place  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402

ROUNDS = 40


def ends_at_once(port: int) -> int:
    rank = place().rank
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=60))
    for number in range(ROUNDS):
        trains(dist.PrefixStore(str(number), store), rank)
    return rank


def trains(store: dist.Store, rank: int) -> None:
    """Train a model whose reducer is the last that holds the group, and is freed as this returns."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))), bucket_cap_mb=0.01
    )
    attachment = ringside.attach(model, engine="native", monitor=False)
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
    dist.destroy_process_group()
    del attachment


@pytest.mark.long
def test_a_model_that_outlives_its_group_can_be_freed() -> None:
    """Where threads do not get a processor at once: then one may want the GIL that the other waits with."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(3)]
    try:
        assert ddp_ranks(2, ends_at_once) == [0, 1]
    finally:
        for other in others:
            other.kill()
            other.wait()

"""Jobs with samplers of the user's, each printed as a line of JSON; test_samplers_of_survive.py runs it.

`python -m tests.hostile.sampling NAME...`: `generator`, `distributed`, `depends_on_rank`, `changed`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tests.survive.counting import Counting, consumed
from tests.survive.herd import Store, run_job
from tests.survive.real_cases import warm_up
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from ringside.survive.train import training

SAMPLES, BATCH, EPOCHS = 40, 8, 6
PER_EPOCH = SAMPLES // BATCH
KILLS = "kill:rank=1,step=7,phase=after_send;kill:rank=0,step=17,phase=after_send"


class OfRank(Sampler[int]):
    """Draws for its own rank, from some epoch on."""

    def __init__(self, since: int) -> None:
        self.times, self.since = 0, since

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Any:
        self.times += 1
        seed = self.times + 1000 * int(os.environ["RANK"]) * (self.times > self.since)
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist())


def generator() -> Sampler[int]:
    """Torch's usual recipe for shuffling that can be reproduced."""
    return RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5))


def distributed() -> Sampler[int]:
    """What a DDP script has."""
    return DistributedSampler(range(SAMPLES), num_replicas=2, rank=int(os.environ["RANK"]))


SAMPLERS: dict[str, tuple[Callable[[], Sampler[int]], str]] = {
    "generator": (generator, KILLS),
    "distributed": (distributed, KILLS),
    "depends_on_rank": (functools.partial(OfRank, 0), ""),
    "changed": (functools.partial(OfRank, 2), ""),
}


def train(sampler: Callable[[], Sampler[int]], rank: int, directory: Path) -> list[float]:
    """Train as one rank; return how often every sample is in the parameters."""
    model = Counting(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given: dict[str, Any] = {"loss": consumed, "batch": BATCH, "micro_batches": 4, "mean": False}
    steps = EPOCHS * PER_EPOCH
    with training(model, optimizer, range(SAMPLES), steps=steps, sampler=sampler(), **given) as t:
        for _ in t:
            time.sleep(0.03)  # so that whoever died is back before the last step
    return [float(count) for count in model.counts.detach()]


def run(name: str, path: Path) -> dict[str, Any]:
    """Run a job of two ranks; return what became of it."""
    sampler, trap = SAMPLERS[name]
    store = Store()
    report = run_job(store, name, 2, functools.partial(train, sampler), path, trap=trap)
    store.close()
    return {
        "trained": report.ended,
        "deaths": report.deaths,
        "errors": [error.strip().splitlines()[-1] for error in report.errors],
        "log": [line for log in path.glob("*.log") for line in log.read_text().splitlines()],
    }


def main(names: list[str]) -> None:
    warm_up()
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ringside-survive-") as path:
            print(json.dumps(run(name, Path(path))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

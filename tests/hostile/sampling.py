"""Jobs with samplers of the user's, each printed as a line of JSON; test_samplers_of_survive.py runs it.

`python -m tests.hostile.sampling NAME...`: `generator`, `distributed`, `depends_on_rank`, `changed`, `came_back`,
`resumed`; and with rules broken `nobody_seeds`, `nobody_compares`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.survive.counting import Counting, consumed
from tests.survive.herd import Store, run_job
from tests.survive.real_cases import warm_up
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from ringside.survive import train as train_module
from ringside.survive.state.kept import START
from ringside.survive.train import training

SAMPLES, BATCH, EPOCHS = 40, 8, 6
PER_EPOCH = SAMPLES // BATCH
KILLS = "kill:rank=1,step=7,phase=after_send;kill:rank=0,step=17,phase=after_send"

ALL_DIE = "kill:rank=0,step=18,phase=after_send;kill:rank=1,step=18,phase=after_send"


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


class OfStart(OfRank):
    """Draws otherwise in a process that was started again, from the second epoch on."""

    def __iter__(self) -> Any:
        self.times += 1
        seed = self.times + 1000 * (os.environ[START] != "1") * (self.times > self.since)
        return iter(torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(seed)).tolist())


def generator() -> Sampler[int]:
    """Torch's usual recipe for shuffling that can be reproduced."""
    return RandomSampler(range(SAMPLES), generator=torch.Generator().manual_seed(5))


def distributed() -> Sampler[int]:
    """What a DDP script has."""
    return DistributedSampler(range(SAMPLES), num_replicas=2, rank=int(os.environ["RANK"]))


SAMPLERS: dict[str, tuple[Any, ...]] = {
    "nobody_seeds": (generator, KILLS.partition(";")[0], "seed"),
    "nobody_compares": (generator, KILLS, "seed", "compare"),
    "generator": (generator, KILLS),
    "distributed": (distributed, KILLS),
    "depends_on_rank": (functools.partial(OfRank, 0), ""),
    "changed": (functools.partial(OfRank, 2), ""),
    "came_back": (functools.partial(OfStart, 1), "kill:rank=0,step=2,phase=after_send"),
}


def break_rules(*rules: str) -> None:
    """Have this process seed no sampler, or compare no orders, as it was before either was done."""
    patch = pytest.MonkeyPatch()  # for as long as the process lives
    if "seed" in rules:
        patch.setattr(
            train_module, "drawn_by", lambda sampler, seed: lambda epoch: np.fromiter(sampler, dtype=np.int64)
        )
    if "compare" in rules:
        patch.setattr(train_module, "agree_on_orders", lambda samples, connection, sampler, has_elders: None)


def train(
    sampler: Callable[[], Sampler[int]], broken: Sequence[str], kept: Path | None, rank: int, directory: Path
) -> list[float]:
    """Train as one rank; return how often every sample is in the parameters."""
    break_rules(*broken)
    model = Counting(SAMPLES)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given: dict[str, Any] = {"loss_fn": consumed, "batch_size": BATCH, "micro_batches": 4, "mean": False}
    given |= {"checkpoint_dir": kept, "checkpoint_every": 4}
    steps = EPOCHS * PER_EPOCH
    with training(model, optimizer, range(SAMPLES), steps=steps, sampler=sampler(), **given) as t:
        for _ in t:
            time.sleep(0.03)  # so that whoever died is back before the last step
    return [float(count) for count in model.counts.detach()]


def run(name: str, path: Path) -> dict[str, Any]:
    """Run a job of two ranks; return what became of it."""
    if name == "resumed":
        kept = path / "checkpoints"
        _ = run_once("first", generator, path, trap=ALL_DIE, ranks=2, kept=kept, respawn=False)
        return run_once("second", generator, path, trap="", ranks=3, kept=kept)
    sampler, trap, *broken = SAMPLERS[name]
    return run_once(name, sampler, path, trap=trap, broken=broken, ranks=3 if name == "came_back" else 2)


def run_once(
    name: str,
    sampler: Callable[[], Sampler[int]],
    path: Path,
    trap: str,
    *,
    ranks: int = 2,
    kept: Path | None = None,
    broken: Sequence[str] = (),
    **given: Any,
) -> dict[str, Any]:
    """Run a job; return what became of it."""
    store = Store()
    report = run_job(store, name, ranks, functools.partial(train, sampler, broken, kept), path, trap=trap, **given)
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

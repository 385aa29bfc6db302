"""What a rank of `price.py` runs: for each fault a watched run with it, beside a healthy twin without a record.

    torchrun ... -m bench.monitor.price_rank --model gpt --inject slow:rank=1,factor=1.3 input:rank=1,seconds=0.015

Every run begins with `HEALTHY_STEPS` healthy steps. Then blocks of steps of the two models alternate, the twin's aside
from the record. Rank 0 writes what each pair of blocks took, [with the fault, without], seconds, into `pairs.json` in
the run's directory, and every rank its own times in the twin's steps, seconds, into `twin-RANK.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from bench.common import make_parser, process_group
from bench.real_runs.rank import GPT, MODELS, burn_of
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.demo.corpus import Corpus
from ringside.faults.inject import inject, parse_fault
from ringside.processes import die_with_parent

# Steps before the fault, steps in a block, pairs of blocks.
HEALTHY_STEPS, BLOCK_STEPS, PAIRS = 40, 5, 24


class Side:
    """A model, and how to train it.

    Args:
        name: One of `MODELS`.
        fault: What is injected, in words.
        corpus: This rank's text.
    """

    def __init__(self, name: str, fault: str, corpus: Corpus) -> None:
        torch.manual_seed(0)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.model = DistributedDataParallel(MODELS[name](), gradient_as_bucket_view=True)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self._injector = inject(parse_fault(fault, ranks), self.model, rank, burn=burn_of(name))
        self._quiet = inject(None, self.model, rank)
        self._corpus, self._generator = corpus, np.random.default_rng(rank)

    def train(self, steps: int, *, healthy: bool = False) -> float:
        """Train so many steps; return how long they took, seconds."""
        injector = self._quiet if healthy else self._injector
        began = time.perf_counter()
        for _ in range(steps):
            injector.step(0)
            text = torch.from_numpy(self._corpus.batch(self._generator, injector.batch(GPT.batch)))
            self._optimizer.zero_grad()
            self.model(text).backward()
            self._optimizer.step()
        return time.perf_counter() - began


class Run(NamedTuple):
    """What a run took, seconds.

    Args:
        pairs: Each pair of blocks, with the fault and without.
        twin: This rank's own times in the steps of the blocks without.
    """

    pairs: list[tuple[float, float]]
    twin: list[float]


def run_fault(name: str, fault: str, corpus: Corpus, path: Path) -> Run:
    """Train a model with a fault and its healthy twin, in turn."""
    sides = faulty, twin = Side(name, fault, corpus), Side(name, "none", corpus)
    session = ringside.attach(faulty.model, run_dir=path).session
    assert session is not None
    ringside.attach(twin.model)
    own: list[float] = []
    session.on_record(lambda record: own.append(record.own_seconds) if session.is_paused else None)
    faulty.train(HEALTHY_STEPS, healthy=True)
    pairs = []
    for number in range(PAIRS + 1):
        took: dict[Side, float] = {}
        for side in sides if number % 2 else reversed(sides):
            # The twin's steps are aside from the record, which is to hold those with the fault alone.
            with session.pause() if side is twin else contextlib.nullcontext():
                took[side] = side.train(BLOCK_STEPS, healthy=side is faulty and not number)
        if number:  # the first pair, with nothing wrong, is for the twin to get warm
            pairs.append((took[faulty], took[twin]))
    session.end()
    return Run(pairs, own[BLOCK_STEPS:])


def main() -> None:
    """Run all faults on this rank, one after another."""
    die_with_parent()
    parser = make_parser("bench.monitor.price_rank", __doc__)
    parser.add_argument("--model", choices=MODELS, default="gpt")
    parser.add_argument("--inject", nargs="+", default=["none"])
    options = parser.parse_args()
    with process_group():
        corpus = Corpus(None, dist.get_rank(), dist.get_world_size(), GPT.context)
        for number, fault in enumerate(options.inject):
            path = Path(os.environ["RINGSIDE_RUN_DIR"], str(number))
            took = run_fault(options.model, fault, corpus, path)
            if dist.get_rank() == 0:
                (path / "pairs.json").write_text(json.dumps(took.pairs))
            (path / f"twin-{dist.get_rank()}.json").write_text(json.dumps(took.twin))


if __name__ == "__main__":
    main()

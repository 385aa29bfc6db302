"""The training script of `ringside demo`, started by torchrun: plain PyTorch, and one line of Ringside.

It may have a fault injected into one of its ranks. Ringside's monitor is not told; the script itself only uses the
fault to know when it has trained long enough. How large a slow rank's fault is may be measured before, on a copy of the
model that is thrown away; then it is fixed.
"""

from __future__ import annotations

import argparse
import copy
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.demo.corpus import Corpus
from ringside.demo.model import SIZES, ByteGPT
from ringside.demo.reveal import OF_A_RANK, names
from ringside.demo.size import calibrated_factor, is_at_bound, log_ratios
from ringside.engine.topology import usable_cores
from ringside.errors import PeerLostError, RingsideError
from ringside.faults.inject import Fault, Kill, Pause, Slow, first_step, inject, parse_fault
from ringside.monitor.run.records import StepRecord
from ringside.processes import die_with_parent
from ringside.pytorch import Session

# -------------------------------------------------------------------------------------------------
# How the ranks of the demo agree on when training ends, without a collective that would disturb what is measured.

EVERY = 8
"""Steps between two looks; what rank 0 decides at one look, all ranks read at the next."""


class Agreement:
    """The end of training, decided by rank 0 while it runs.

    Args:
        store: The job's store.
        rank: This rank.
        limit: The number of steps never exceeded.
        decide: On rank 0, returns how many steps there shall be as far as is known now.
    """

    def __init__(self, store: Store, rank: int, limit: int, decide: Callable[[], int]) -> None:
        self._store, self._rank, self._decide = store, rank, decide
        self._end = limit

    def goes_on(self, step: int) -> bool:
        """Tell whether training step number `step` shall be done; every rank asks before every step."""
        look, rest = divmod(step, EVERY)
        if not rest:
            if self._rank == 0:
                soonest = (look + 1) * EVERY
                self._end = min(self._end, max(self._decide(), soonest))
                self._store.set(f"end/{look + 1}", str(self._end))
            if look:
                self._end = int(self._store.get(f"end/{look}"))
        return step < self._end


LEARNING_RATE = 2e-3
WARM_UP_STEPS = 10
AFTERWARDS = 32
"""Steps after the verdict (or after a fault that lasts for one step), so that the price is seen to grow."""
MEASURED = 64
"""Steps of a fault that lasts, at least, from which its size is known."""


class Trainer:
    """One rank's training.

    Args:
        options: What the command line said.
        rank: This rank.
        ranks: How many there are.
    """

    def __init__(self, options: argparse.Namespace, rank: int, ranks: int) -> None:
        self.size = SIZES[options.size]
        self.rank = rank
        self.fault = parse_fault(options.inject, ranks)
        self.corpus = Corpus(options.corpus, rank, ranks, self.size.context)
        self.generator = np.random.default_rng((options.seed, rank))
        torch.manual_seed(options.seed)
        self.model = ByteGPT(self.size)
        self.aside = np.random.default_rng((options.seed, rank, 1))
        self.injector = inject(self.fault, self.model, rank)

    def train(self, store: Store, limit: int, calibrate_to: float = 0.0) -> Session:
        """Train until the monitor has named the rank that is slow; return the monitor.

        Args:
            store: The job's.
            limit: The most steps.
            calibrate_to: How much slower, beside the others and before, a slow rank shall be; 0: as its factor says.
        """
        wrapped = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        session = ringside.attach(wrapped).session
        if session is None:
            raise RingsideError("RINGSIDE=off is set: there is nothing to show")
        if calibrate_to and isinstance(self.fault, Slow):
            self.fault = self.calibrate(self.fault, session, calibrate_to)
            self.injector = inject(self.fault, self.model, self.rank)
        session.event("stage", stage="training", of=limit)
        optimizer = make_optimizer(wrapped)
        agreement = Agreement(store, self.rank, limit, lambda: last_step(self.fault, session, limit))
        step = 0
        while agreement.goes_on(step):
            self.injector.step(step)
            session.log(loss=self.step(wrapped, optimizer, step))
            step += 1
        self.injector.remove()
        return session

    def step(self, model: DistributedDataParallel, optimizer: Any, step: int = WARM_UP_STEPS) -> float:
        """Do one training step; return its loss in nats per byte."""
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARM_UP_STEPS, 1.0)
        return self.train_batch(model, optimizer, self.generator, self.injector.batch(self.size.batch))

    def calibrate(self, fault: Slow, session: Session, size: float) -> Slow:
        """Return a fault with the factor at which its rank is slower by `size`. A collective.

        A copy of the model is trained in blocks with and without the fault, in turn, and the factor is corrected
        after each two of both. The model, its data and all random states stay as they are.
        """
        wrapped = DistributedDataParallel(copy.deepcopy(self.model), gradient_as_bucket_view=True)
        attachment = ringside.attach(wrapped)
        optimizer = make_optimizer(wrapped)
        aside = Aside(session)

        def train() -> None:
            self.train_batch(wrapped, optimizer, self.aside, self.size.batch)

        aside.block(train)  # DDP's buckets are rebuilt, caches are filled
        factor, factors, ratios = 1.0 + size, list[float](), list[Seconds]()
        for block in range(CALIBRATION_BLOCKS):
            is_faulty = (block + block // 2) % 2 == 1  # without with with without: a drift hits both alike
            injector = inject(replace(fault, factor=factor, from_step=0) if is_faulty else None, wrapped, self.rank)
            injector.step(0)
            own = [record.own_seconds for record in aside.block(train, CALIBRATION_SETTLE)]
            injector.remove()
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, own)
            ratios.append(log_ratios(np.array(everybody).T, fault.rank))
            factors += [factor if is_faulty else 1.0] * len(own)
            if block % 4 == 3:
                factor = calibrated_factor(np.concatenate(ratios), factors, size)
        attachment.detach()
        at_bound = is_at_bound(factor, size)
        session.event("calibrated", factor=factor, size=size, steps=len(factors), at_bound=at_bound)
        return replace(fault, factor=factor)

    def train_batch(
        self, model: DistributedDataParallel, optimizer: Any, generator: np.random.Generator, sequences: int
    ) -> float:  # fmt: skip
        """Train on that many sequences; return the loss in nats per byte."""
        text = torch.from_numpy(self.corpus.batch(generator, sequences))
        optimizer.zero_grad()
        loss = model(text)
        loss.backward()
        ringside.log_step(loss=loss.item())
        optimizer.step()
        return float(loss.detach())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of the demo."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)


def last_step(fault: Fault | None, session: Session, limit: int) -> int:
    """Return how many steps there shall be as far as is known now; only rank 0 knows of verdicts."""
    if fault is None:
        return limit
    if isinstance(fault, Kill) or (isinstance(fault, Pause) and not fault.every):
        return fault.at_step + AFTERWARDS
    begin = first_step(fault)
    named = [v.detected_step for v in session.verdicts if names(fault, v) and v.detected_step > begin]
    measured = begin + MEASURED if isinstance(fault, OF_A_RANK) else 0
    return max(min(named, default=limit) + AFTERWARDS, measured)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train on this rank; return the exit status."""
    die_with_parent()
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: _stop(stopped, signum, frame))
    options = parse(arguments)
    try:
        run(options)
    except KeyboardInterrupt:
        pass
    except PeerLostError as error:
        if not stopped:
            # torchrun will send SIGTERM; the monitor still has to write what it knows, at exit.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print(f"ringside demo: {error}", file=sys.stderr)
            return 1
    except (RuntimeError, RingsideError):
        if not stopped:  # else a peer was stopped a little earlier than we were
            raise
    return 128 + stopped[0] if stopped else 0


def run(options: argparse.Namespace) -> None:
    """Train on this rank."""
    torch.set_num_threads(max(usable_cores() // int(os.environ["LOCAL_WORLD_SIZE"]), 1))
    store, rank, ranks = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=ranks)
    trainer = Trainer(options, rank, ranks)
    session = trainer.train(PrefixStore("demo", store), options.steps, options.calibrate_to)
    if options.compare:
        found = compare(trainer.model, session, trainer.step, options.compare)
        session.event("comparison", **found)
    session.end()
    dist.destroy_process_group()


def _stop(stopped: list[int], signum: int, frame: FrameType | None) -> None:
    if not stopped:
        stopped.append(signum)
        raise KeyboardInterrupt


def make_parser(module: str) -> argparse.ArgumentParser:
    """Return the parser of what every training of the demo takes."""
    parser = argparse.ArgumentParser(prog=module)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--corpus", type=Path)
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what the command line asks for."""
    parser = make_parser("ringside.demo.train")
    parser.add_argument("--inject", default="none")
    parser.add_argument("--compare", type=int, default=0, help="blocks per side")
    parser.add_argument("--calibrate-to", type=float, default=0.0, help="the size of a slow rank, 0.3; 0: its factor")
    return parser.parse_args(arguments)


# Steps beside the run, in blocks; the same training over Ringside and over the process group's own all-reduce, in turn,
# in the same processes.

BLOCK_STEPS = 8
SETTLE_STEPS = 3
"""Steps at the start of a block that are not counted: caches, and DDP's rebuilt buckets in the first block."""
CALIBRATION_BLOCKS, CALIBRATION_SETTLE = 12, 1
"""With and without the fault together; before them is one that is not counted."""


class Aside:
    """Steps that the monitor times and that are no part of the run.

    Args:
        session: The monitor.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._now: list[StepRecord] | None = None
        session.on_record(self._add)

    def block(self, train_step: Callable[[], object], settle: int = SETTLE_STEPS) -> list[StepRecord]:
        """Do a block of steps; return this rank's records of those after the first `settle`."""
        now: list[StepRecord] = []
        with self._session.pause():
            self._now = now
            for _ in range(BLOCK_STEPS):
                train_step()
            self._session.clock.flush()
            self._now = None
        return now[settle:]

    def _add(self, record: StepRecord) -> None:
        if self._now is not None:
            self._now.append(record)


FIELDS = ("step_seconds", "exposed_seconds", "sync_seconds")
TrainStep = Callable[[DistributedDataParallel, Any], object]
Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Side:
    """One of the two: a model of its own, its optimizer, what it was measured at."""

    engine: str
    model: DistributedDataParallel
    optimizer: Any
    rows: list[tuple[float, ...]]


def compare(model: nn.Module, session: Session, train_step: TrainStep, blocks: int) -> dict[str, Any]:
    """Train two copies of a model in alternating blocks and return how they compare. A collective.

    Steps made here are no part of the run. A synchronisation's time is that of the rank that arrived last, which
    waited for nobody: the least over ranks, step by step.

    Args:
        model: The model, not wrapped, with all hooks removed.
        session: The monitor that times the steps.
        train_step: Does one training step with a model and its optimizer.
        blocks: How many blocks of `BLOCK_STEPS` steps each side gets.
    """
    sides = []
    for engine in (None, "native"):
        wrapped = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
        attachment = ringside.attach(wrapped, engine=engine)
        sides.append(Side(attachment.engine, wrapped, make_optimizer(wrapped), []))
    aside = Aside(session)
    for block in range(2 * blocks):
        session.event("stage", stage="comparison", done=block, of=2 * blocks)
        side = sides[(block + block // 2) % 2]  # ours theirs theirs ours: a drift hits both alike
        records = aside.block(partial(train_step, side.model, side.optimizer))
        side.rows.extend(tuple(getattr(record, name) for name in FIELDS) for record in records)
    # Everybody's rows, float64 [ranks, steps, fields], as many steps as all have.
    rows = []
    for side in sides:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, side.rows)
        steps = min(map(len, everybody))
        rows.append(np.array([each[:steps] for each in everybody], dtype=np.float64).reshape(-1, steps, len(FIELDS)))
    return summarize((sides[0].engine, rows[0]), (sides[1].engine, rows[1]))


def summarize(ours: tuple[str, Seconds], peer: tuple[str, Seconds]) -> dict[str, Any]:
    """Return how two sides compare.

    Args:
        ours: The engine's name, and what every rank's steps took: seconds, float64 [ranks, steps, `FIELDS`].
        peer: The same of the other side.
    """
    (engine, mine), (name, theirs) = (ours[0], _middles(ours[1])), (peer[0], _middles(peer[1]))
    return {
        "engine": engine,
        "peer": name,
        "step_ratio": theirs["step_seconds"] / mine["step_seconds"],
        "sync_ratio": theirs["sync_seconds"] / mine["sync_seconds"],
        "exposed_ratio": theirs["exposed_seconds"] / mine["exposed_seconds"],
        "ours": mine,
        "theirs": theirs,
        "steps": int(ours[1].shape[1]),
    }


def _middles(rows: Seconds) -> dict[str, float]:
    """Return the medians over steps of the least over ranks, and what the exposed part is of the step."""
    middle = dict(zip(FIELDS, np.median(rows.min(axis=0), axis=0).tolist(), strict=True))
    return {**middle, "share": middle["exposed_seconds"] / middle["step_seconds"]}


if __name__ == "__main__":
    raise SystemExit(main())

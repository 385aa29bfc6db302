"""The same training over Ringside and over the process group's own all-reduce, in turn, in the same processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.monitor.run.records import StepRecord
from ringside.pytorch import Session

BLOCK_STEPS = 8
SETTLE_STEPS = 3
"""Steps at the start of a block that are not counted: caches, and DDP's rebuilt buckets in the first block."""

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


def compare(
    model: nn.Module, session: Session, make_optimizer: Callable[[nn.Module], Any], train_step: TrainStep, blocks: int
) -> dict[str, Any]:
    """Train two copies of a model in alternating blocks and return how they compare. A collective.

    Steps made here are no part of the run. A synchronisation's time is that of the rank that arrived last, which
    waited for nobody: the least over ranks, step by step.

    Args:
        model: The model, not wrapped, with all hooks removed.
        session: The monitor that times the steps.
        make_optimizer: Makes an optimizer for a model.
        train_step: Does one training step with a model and its optimizer.
        blocks: How many blocks of `BLOCK_STEPS` steps each side gets.
    """
    sides = [_side(model, engine, make_optimizer) for engine in (None, "native")]
    now: list[Side] = []
    session.on_record(lambda record: now[0].rows.append(_row(record)) if now else None)
    with session.pause():
        for block in range(2 * blocks):
            session.event("stage", stage="comparison", done=block, of=2 * blocks)
            side = sides[(block + block // 2) % 2]  # ours theirs theirs ours: a drift hits both alike
            now[:] = [side]
            before = len(side.rows)
            for _ in range(BLOCK_STEPS):
                train_step(side.model, side.optimizer)
            session.clock.flush()
            del side.rows[before : before + SETTLE_STEPS]
    now.clear()
    ours, peer = ((side.engine, _gather(side.rows)) for side in sides)
    return summarize(ours, peer)


def _side(model: nn.Module, engine: str | None, make_optimizer: Callable[[nn.Module], Any]) -> Side:
    wrapped = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    attachment = ringside.attach(wrapped, engine=engine)
    return Side(attachment.engine, wrapped, make_optimizer(wrapped), [])


def _row(record: StepRecord) -> tuple[float, ...]:
    return tuple(getattr(record, field) for field in FIELDS)


def _gather(rows: list[tuple[float, ...]]) -> Seconds:
    """Return everybody's rows, float64 [ranks, steps, fields], as many steps as all have."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, rows)
    steps = min(map(len, everybody))
    return np.array([each[:steps] for each in everybody], dtype=np.float64).reshape(-1, steps, len(FIELDS))


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

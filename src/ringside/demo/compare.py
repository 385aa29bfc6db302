"""The same training over Ringside and over the process group's own all-reduce, in turn, in the same processes."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringside
from ringside.faults.inject import Diverge, Fault, Hang, Input, Kill, Pause, Slow, Stop, Uneven, first_step
from ringside.monitor.run.records import StepRecord
from ringside.monitor.verdict import Verdict, percent
from ringside.pytorch import Session
from ringside.text import ms

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
    with session.aside():
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


# -------------------------------------------------------------------------------------------------
# What was injected, held against what was found; and the comparison, in words.

FACTOR = 1.3
SLOWNESS = ("slow_rank", "uneven_work", "input_bound")
WANTED: Mapping[type, tuple[str, ...]] = {
    Slow: SLOWNESS,
    Input: SLOWNESS,
    Uneven: SLOWNESS,
    Pause: SLOWNESS,
    Hang: ("hang",),
    Stop: ("hang",),
    Diverge: ("diverged",),
    Kill: ("dead_rank",),
}
"""Which verdicts are right about a fault."""
LONG_PAUSE_S = 4.0
"""A pause so long may be called a hang that was over again."""


def draw(seed: int, ranks: int, steps: int) -> Slow:
    """Return a slow rank drawn at random: who, and from which step on (after a healthy fifth of `steps`)."""
    generator = random.Random(seed)
    return Slow(generator.randrange(ranks), FACTOR, generator.randint(steps // 5, 3 * steps // 10))


def injected(fault: Fault | None) -> dict[str, Any]:
    """Return `summary.json`'s `injected`."""
    if fault is None:
        return {"kind": "none", "ranks": [], "factor": None, "from_step": None}
    content: dict[str, Any] = {"kind": fault.kind, "ranks": [fault.rank], "factor": None}
    given = {name: getattr(fault, name) for name in ("factor", "seconds", "by") if hasattr(fault, name)}
    return {**content, **given, "from_step": first_step(fault)}


def reveal(fault: Fault | None, verdicts: Sequence[Verdict]) -> tuple[bool, str]:
    """Return whether the verdicts are right about what was injected, and both in words."""
    if fault is None:
        return not verdicts, _named_nobody(verdicts, "Nothing was injected")
    words = f"What was injected: {fault.words()}"
    if isinstance(fault, Pause) and not fault.every:
        called = [v for v in verdicts if v.kind != "hang" or v.ranks != [fault.rank] or fault.seconds < LONG_PAUSE_S]
        return not called, _named_nobody(called, f"{words}. One stall makes no slow rank")
    begin = 0 if isinstance(fault, Kill) else first_step(fault)
    told = [v for v in verdicts if names(fault, v)]
    named = [v for v in told if v.kind in WANTED[type(fault)] and v.detected_step >= begin]
    others = [v for v in verdicts if v not in told]
    if named and not others:
        return True, f"{words}. The verdict is right{_delay(fault, named[0])}."
    if named:
        return True, f"{words}. It was named, and so was somebody else: another load on this machine, or a mistake."
    if others:
        return False, f"{words}. The verdict is wrong: it names somebody else."
    return (
        False,
        f"{words}. It was not found in {'time' if isinstance(fault, Slow | Input | Uneven | Pause) else 'this run'}.",
    )


def names(fault: Fault, verdict: Verdict) -> bool:
    """Tell whether a verdict is on the rank of a fault; of two replicas that differ neither can be told right."""
    if isinstance(fault, Diverge) and verdict.kind == "diverged":
        return fault.rank in verdict.ranks
    return verdict.ranks == [fault.rank]


def comparison_lines(found: Mapping[str, Any]) -> list[str]:
    """Return the comparison in words; nothing where there was none."""
    if not found:
        return []
    peer = str(found["peer"]).capitalize()
    if found["engine"] == found["peer"]:
        return [f"Gradients went over {peer} all the time: there is nothing to compare with (see the log for why)."]
    ours, theirs = found["ours"], found["theirs"]
    return [
        f"The same training over {peer}, in turn with ours, {found['steps']} steps each ({peer}'s time over ours):",
        f"  step           {found['step_ratio']:5.2f} ×  {_both('step_seconds', theirs, ours)}",
        f"  synchronising  {found['sync_ratio']:5.2f} ×  {_both('sync_seconds', theirs, ours)}, partly behind backward",
        f"  blocked by it         {_both('exposed_seconds', theirs, ours)}: "
        f"{percent(theirs['share'])} of the step against {percent(ours['share'])}",
    ]


def _both(name: str, theirs: Mapping[str, float], ours: Mapping[str, float]) -> str:
    return f"{ms(theirs[name])} against {ms(ours[name])}"


def _named_nobody(verdicts: Sequence[Verdict], words: str) -> str:
    if verdicts:
        return f"{words}, yet a rank was named: another load on this machine, or a mistake."
    return f"{words}, and nobody was named: right."


def _delay(fault: Fault, verdict: Verdict) -> str:
    if not isinstance(fault, Slow | Input | Uneven):
        return ""
    return f", {verdict.detected_step - fault.from_step + 1} steps after it began"

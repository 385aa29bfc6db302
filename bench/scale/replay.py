"""Recorded Kineto traces as jobs for `job.py`: what the doctor's reader says of each rank's steps, run again.

Profilers record few steps (the shared NCCL traces one of eight ranks), so there are two ways of making a run of them:

* **repeated**: the recorded steps over and over, each rank with its own times. Whoever was slower in what was recorded
  is so for ever, and the monitor has to say that.
* **dealt**: in every step each rank is given the time that some rank had in some recorded step, drawn anew. Then no
  rank is slower than another but by chance, and chance is as wide as what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench.scale.rank import Floats, Job

from ringside.doctor.files.source import Limits, Progress
from ringside.doctor.files.walk import gather
from ringside.doctor.kineto import reader as kineto
from ringside.doctor.kineto.collector import read_trace
from ringside.doctor.kineto.steps import RankSteps, steps_of
from ringside.doctor.kineto.trace import jobs_of
from ringside.errors import UsageError

SLOWER = 1.12  # own time of the rank that is made slow, by what it recorded


@dataclass(frozen=True)
class Recorded:
    """What a job's traces say of the steps that all of its ranks recorded.

    Args:
        own_s: Step without exposed communication, float64 [steps, ranks], seconds.
        wire_s: What even the rank that waited least waited for, median of the steps, seconds.
        payload_bytes, collectives: Per rank and step, means.
        backend: `nccl`, `gloo`, ...
    """

    own_s: Floats
    wire_s: float
    payload_bytes: int
    collectives: int
    backend: str


@dataclass(frozen=True)
class Turn:
    """One replay.

    Args:
        way: `repeated` or `dealt`.
        injected: Whether a rank becomes 12% slower.
        culprit, onset: Which, and at which step.
    """

    way: str
    injected: bool
    culprit: int
    onset: int


def recorded(paths: Sequence[str | Path]) -> Recorded:
    """Return what the traces at `paths` say, of the job with most ranks.

    Raises:
        UsageError: No two ranks recorded the same step there.
    """
    traces = []
    with gather(paths, progress=Progress(), limits=Limits()) as gathered:
        for source in gathered.sources:
            if kineto.matches(source):
                with source.open() as stream:
                    traces.append(read_trace(stream, source.name))
    jobs = sorted(jobs_of([trace for trace in traces if trace.events]), key=lambda job: -len(job.traces))
    steps = [steps_of(trace) for trace in jobs[0].traces] if jobs else []
    numbers = sorted(set.intersection(*(set(rank.numbers.tolist()) for rank in steps))) if len(steps) > 1 else []
    if not numbers:
        where = ", ".join(map(str, paths))
        raise UsageError(f"{where}: no two ranks' Kineto traces of one step; give --replay the traces of all ranks")
    own, exposed = (_table(steps, numbers, name) for name in ("own_s", "exposed_s"))
    return Recorded(
        own_s=own,
        wire_s=float(np.median(exposed.min(axis=1))),
        payload_bytes=int(_table(steps, numbers, "nbytes").mean()),
        collectives=round(float(_table(steps, numbers, "collectives").mean())),
        backend=jobs[0].traces[0].backend,
    )


def _table(steps: Sequence[RankSteps], numbers: Sequence[int], name: str) -> Floats:
    """One field of all ranks, float64 [steps, ranks]."""
    columns = [getattr(rank, name)[np.searchsorted(rank.numbers, numbers)] for rank in steps]
    return np.stack(columns, axis=1).astype(np.float64)


def replay(seen: Recorded, turn: Turn, steps: int, seed: int) -> Job:
    """Return a job that runs what was recorded for so many steps.

    Args:
        seen: What was recorded.
        turn: In which way.
        steps: Number of steps.
        seed: Deals.
    """
    rng = np.random.default_rng([seed, steps])
    rows = rng.integers(len(seen.own_s), size=steps) if turn.way == "dealt" else np.arange(steps) % len(seen.own_s)
    own = seen.own_s[rows]
    if turn.way == "dealt":
        own = np.take_along_axis(own, rng.integers(own.shape[1], size=own.shape), axis=1)
    if turn.injected:
        own[turn.onset :, turn.culprit] *= SLOWER
    return Job(own, seen.wire_s, payload_bytes=seen.payload_bytes, collectives=seen.collectives)

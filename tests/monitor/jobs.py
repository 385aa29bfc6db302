"""Rows of generated jobs: what every rank would record, healthy or with one kind of trouble."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from ringside.monitor import RunInfo
from ringside.monitor.collector import Watcher
from ringside.monitor.run.records import Group, GroupUse, Row, StepRecord
from ringside.monitor.verdict import Verdict, VerdictEvent


def row(
    step: int,
    ranks: int,
    noise: np.random.Generator,
    *,
    own: float = 0.06,
    exposed: float = 0.01,
    jitter: float = 0.05,
    slow_rank: int = -1,
    **fields: Any,
) -> Row:
    """One step: own times with jitter, everybody blocked until the slowest is there and for `exposed` after that."""
    works = own * np.exp(noise.normal(0, jitter, ranks))
    if slow_rank >= 0:
        works[slow_rank] *= 3
    seconds = float(works.max()) + exposed
    return {
        rank: StepRecord(
            step=step,
            rank=rank,
            ended_unix=float(step),
            step_seconds=seconds,
            own_seconds=float(works[rank]),
            exposed_seconds=seconds - float(works[rank]),
            **fields,
        )
        for rank in range(ranks)
    }


def watch(watcher: Watcher, rows: Iterable[Row]) -> list[VerdictEvent]:
    """Show rows to a watcher; return what it found."""
    return [finding for one in rows for finding in watcher.update(min(one.values(), key=_step).step, one)]


def _step(record: StepRecord) -> int:
    return record.step


def opened(findings: Iterable[VerdictEvent]) -> list[Verdict]:
    """The verdicts that began."""
    return [finding.verdict for finding in findings if not finding.ended]


def records_of(own: np.ndarray, **fields: float) -> list[StepRecord]:
    """Records as an ideal job of these own times writes them: everybody is blocked until the slowest is there."""
    return [
        StepRecord(
            step=step,
            rank=rank,
            ended_unix=1.7e9 + step,
            step_seconds=float(row.max()) + 0.004,
            own_seconds=float(value),
            wait_seconds=float("nan"),
            exposed_seconds=float(row.max() - value) + 0.004,
            **fields,
        )
        for step, row in enumerate(own)
        for rank, value in enumerate(row)
    ]


def run_info(ranks: int, name: str = "test") -> RunInfo:
    return RunInfo(
        schema=1,
        name=name,
        started_unix=1.7e9,
        command=["train.py"],
        world_size=ranks,
        hosts=[f"host-{rank // 4}" for rank in range(ranks)],
        pids=[100 + rank for rank in range(ranks)],
        engine="ringside",
        algorithm="push",
    )


def event(
    kind: str = "verdict", verdict: str = "slow_rank", rank: int = 1, at: int = 50, **more: Any
) -> dict[str, Any]:
    """An event as the collector emits it."""
    content = {"kind": verdict, "ranks": [rank], "since_step": at - 5, "detected_step": at, "excess_ratio": 0.3, **more}
    return {"unix": 1000.0 + at, "kind": kind, "verdict": content}


DATA = [Group(name="1", description="mesh_dp", ranks=(0, 2)), Group(name="2", description="mesh_dp", ranks=(1, 3))]
STAGES = [Group(name="3", description="mesh_pp", ranks=(0, 1)), Group(name="4", description="mesh_pp", ranks=(2, 3))]
LENGTHS = np.array([0.05, 0.10, 0.05, 0.10])
"""Own times of two stages of a pipeline, the second one twice as heavy, and of their replicas."""


def peer_rows(
    steps: int, lengths: np.ndarray = LENGTHS, *, slow: int = -1, by: float = 1.25, since: int = 60, seed: int = 1
) -> list[Row]:
    """Steps in which everybody works so long, and one rank longer from a step on; all are done together."""
    noise, found = np.random.default_rng(seed), []
    for step in range(steps):
        own = lengths * np.exp(noise.normal(0, 0.02, len(lengths)))
        if slow >= 0 and step >= since:
            own[slow] *= by
        seconds = float(own.max()) + 0.01
        found.append(
            {
                rank: StepRecord(
                    step=step,
                    rank=rank,
                    ended_unix=float(step),
                    step_seconds=seconds,
                    own_seconds=float(own[rank]),
                    exposed_seconds=seconds - float(own[rank]),
                    compute_seconds=float(own[rank]),
                )
                for rank in range(len(lengths))
            }
        )
    return found


TENSOR = [Group(name="3", description="mesh_tp", ranks=(0, 1)), Group(name="4", description="mesh_tp", ranks=(2, 3))]


def crossed_rows(steps: int, since: int = 60) -> list[Row]:
    """Steps of two tensor-parallel pairs and their replicas. Rank 3 becomes slow: rank 1, its replica, waits for it,
    rank 0, that one's neighbour, for that, and rank 2 for rank 3."""
    blocked = {0: ("1", 0.0, "3", 0.03), 1: ("2", 0.03, "3", 0.0), 2: ("1", 0.0, "4", 0.03), 3: ("2", 0.0, "4", 0.0)}
    job = peer_rows(steps, np.full(4, 0.1), slow=3, since=since)
    for number, row in enumerate(job):
        late = number >= since
        for rank, (data, in_data, tensor, in_tensor) in blocked.items():
            uses = (
                GroupUse(data, -1, 1, 8, 0.002 + late * in_data),
                GroupUse(tensor, -1, 1, 8, 0.001 + late * in_tensor),
            )
            row[rank] = msgspec.structs.replace(row[rank], groups=uses)
    return job

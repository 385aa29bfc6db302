"""Run directories for views, written as an ideal job of given own times writes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.run.directory import RunWriter

SYNC_S = 0.004
OPTIMIZER_S = 0.002


def own_times(steps: int, ranks: int, *, jitter: float = 0.02, seed: int = 0) -> np.ndarray:
    """Healthy own times around 0.1 s, [steps, ranks]."""
    return 0.1 * np.exp(np.random.default_rng(seed).normal(0, jitter, (steps, ranks)))


def write_run(
    path: Path, own: np.ndarray, *, clocks: np.ndarray | None = None, engine: str = "ringside", first: int = 0
) -> Path:
    """Record a job of these own times [steps, ranks], its first step numbered `first`; `clocks` are seconds by which
    ranks' clocks are ahead."""
    ranks = own.shape[1]
    ahead = np.zeros(ranks) if clocks is None else clocks
    info = RunInfo(
        schema=1, name=path.name, started_unix=1.7e9, command=["train.py"], world_size=ranks,
        hosts=[f"host-{rank // 4}" for rank in range(ranks)], pids=list(range(100, 100 + ranks)), engine=engine,
        algorithm="push", versions={"torch": "2.13.0", "ringside": "0.1.0"},
    )  # fmt: skip
    writer = RunWriter(path, info)
    now = 1.7e9
    for step, row in enumerate(own, first):
        length = float(row.max()) + SYNC_S
        now += length
        writer.append(
            StepRecord(
                step=step, rank=rank, ended_unix=now + ahead[rank], step_seconds=length, own_seconds=float(value),
                wait_seconds=float(row.max() - value), exposed_seconds=float(row.max() - value) + SYNC_S,
                data_seconds=0.01, forward_seconds=0.3 * float(value), optimizer_seconds=OPTIMIZER_S,
                backward_seconds=0.7 * float(value) - 0.01 - OPTIMIZER_S, payload_bytes=4_000_000, collectives=2,
                sync_seconds=0.02, cpu_seconds=float(value),
            )
            for rank, value in enumerate(row)
        )  # fmt: skip
    writer.event({"unix": now, "kind": "ended", "steps": len(own)})
    return path


def slow_run(path: Path, *, ranks: int = 4, steps: int = 120, rank: int = 2, onset: int = 60) -> Path:
    """A run in which one rank becomes 30% slower, with no event that says so: the detector finds it."""
    own = own_times(steps, ranks)
    own[onset:, rank] *= 1.3
    write_run(path, own)
    (path / "events.jsonl").write_text("")
    return path

"""A run directory of ours, written by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.run.directory import RunWriter


def write_run(path: Path, slow_rank: int | None = None) -> Path:
    info = RunInfo(
        schema=1, name="run", started_unix=0, command=[], world_size=8, hosts=["h"] * 8, pids=[0] * 8, engine="gloo"
    )  # fmt: skip
    own = 0.1 * np.exp(np.random.default_rng(0).normal(0, 0.02, (120, 8)))
    if slow_rank is not None:
        own[60:, slow_rank] *= 1.3
    writer = RunWriter(path, info)
    writer.append(
        StepRecord(
            step=s, rank=r, ended_unix=0, step_seconds=float(own[s].max() + 0.01), own_seconds=float(own[s, r]),
            exposed_seconds=float(own[s].max() + 0.01 - own[s, r]), wait_seconds=float(own[s].max() - own[s, r]),
            optimizer_seconds=0.02, collectives=3, payload_bytes=30_000_000,
        )
        for s in range(120)
        for r in range(8)
    )  # fmt: skip
    writer.event({"unix": 1.0, "kind": "ended"})
    return writer.path

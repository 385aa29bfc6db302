"""Writes a run without an end, in which rank 2 becomes slow."""

from __future__ import annotations

import sys

from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.run.directory import RunWriter

info = RunInfo(
    schema=1, name="run", started_unix=0, command=[], world_size=4, hosts=["h"] * 4, pids=[0] * 4, engine="gloo"
)
writer, step = RunWriter(sys.argv[1], info), 0
while True:
    own = [0.1 + 0.04 * (rank == 2 and step > 60) + 0.001 * ((step * 7 + rank * 3) % 5) for rank in range(4)]
    writer.append(
        StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=max(own), own_seconds=own[rank])
        for rank in range(4)
    )
    step += 1

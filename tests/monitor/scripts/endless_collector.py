"""Collects the steps of a run without an end, in which rank 1 is slow from step 60 on; says so at step 300."""

from __future__ import annotations

import sys

from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import RunWriter
from ringside.monitor.run.records import RunInfo, StepRecord

info = RunInfo(
    schema=1, name="n", started_unix=0.0, command=[], world_size=2, hosts=["a", "a"], pids=[1, 2], engine="gloo"
)
collector = StepCollector(2, RunWriter(sys.argv[1], info))
print("up", flush=True)
for step in range(10**9):
    own = 0.1, 0.13 if step >= 60 else 0.1
    collector.add(
        StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=1, own_seconds=own[rank]) for rank in (0, 1)
    )
    collector.note("note", text="x" * (step % 3000))
    if step == 300:
        print("at step 300", flush=True)

"""The what-if answers as they are shown: for `--json`, as tables, as verdicts."""

from __future__ import annotations

from typing import Any

import msgspec

from ringside.doctor.findings import Number, Sheet
from ringside.doctor.what_if_answer import WhatIf
from ringside.monitor import Verdict
from ringside.monitor.verdict import percent
from ringside.text import ms

SLOW = 1.1
"""A job has stragglers if they make it this many times slower (section 4.1 of arXiv 2505.05713)."""
EXPLAINS = 0.5
"""The worst workers, or the last stage, are the reason if they explain this share of the lost time (section 5)."""
WORKERS = "replayed with only these workers repaired, the job gets faster: that alone"
STAGE = "the last pipeline stage has more to do than the others: that alone"
MOVE = (
    "Compare these ranks' clocks, temperature and neighbours with a healthy rank's; move them if nothing explains it."
)
REBALANCE = "Move layers from the last stage to the others: the loss and the vocabulary's projection weigh as well."


def as_dict(found: WhatIf, source: str) -> dict[str, Any]:
    """Return the content of `what_if` in `ringside doctor --json`; `source` says what was replayed."""
    plain: dict[str, Any] = msgspec.to_builtins(found)
    return {**plain, "source": source}


def sheet(found: WhatIf) -> Sheet:
    """Return what each stage, replica and type of operation costs by itself, as a table."""
    rows: list[list[Number | None]] = [
        [f"stage {stage}", value, found.ideal_step_s * (value - 1)] for stage, value in enumerate(found.by_stage)
    ]
    rows += [[f"replica {lane}", value, found.ideal_step_s * (value - 1)] for lane, value in enumerate(found.by_lane)]
    by_kind = sorted(found.by_operation.items(), key=lambda item: -item[1])
    rows += [[kind, value, found.ideal_step_s * (value - 1)] for kind, value in by_kind]
    note = (
        f"A step takes {ms(found.step_s)}, without stragglers {ms(found.ideal_step_s)}. Each row: only these "
        "operations as slow as they were, all others as their peers."
    )
    return Sheet(title="What if", columns=["slow alone", "slowdown", "seconds per step"], rows=rows, note=note)


def verdicts(found: WhatIf, steps: list[int], *, replicas: int) -> list[Verdict]:
    """Return who is the reason of the slowdown: single workers, or the last stage of the pipeline.

    Args:
        found: The answers.
        steps: Numbers of the steps replayed.
        replicas: Data-parallel replicas; with one, a worker is its whole stage and gets other work than the others.
    """
    if found.slowdown < SLOW or not steps:
        return []
    worst, last = found.worst_worker_share or 0.0, found.last_stage_share or 0.0
    pipeline = len(found.by_stage) > 1
    if worst >= EXPLAINS and (replicas > 1 or not pipeline):
        return [_verdict(found, steps, "slow_rank", found.worst_ranks, worst)]
    if last >= EXPLAINS and pipeline:
        return [_verdict(found, steps, "uneven_work", found.last_stage_ranks, last)]
    return []


def _verdict(found: WhatIf, steps: list[int], kind: str, ranks: list[int], share: float) -> Verdict:
    slow = kind == "slow_rank"
    who, advice = (WORKERS, MOVE) if slow else (STAGE, REBALANCE)
    return Verdict(
        kind=kind,
        ranks=sorted(ranks),
        since_step=steps[0],
        detected_step=steps[-1],
        excess_ratio=found.slowdown - 1.0,
        cause=f"{who} explains {percent(min(share, 1.0))} of the time lost",
        evidence={
            "slowdown": found.slowdown,
            "explained_ratio": share,
            "step_seconds": found.step_s,
            "ideal_step_seconds": found.ideal_step_s,
        },
        cost_rank_seconds=found.cost_rank_hours * 3600.0,
        advice=advice,
    )

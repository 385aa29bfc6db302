"""Rows of generated jobs: what every rank would record, healthy or with one kind of trouble."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ringside.monitor.detect import Finding
from ringside.monitor.records import StepRecord
from ringside.monitor.verdict import Verdict
from ringside.monitor.watcher import Row, Watcher


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


def watch(watcher: Watcher, rows: Iterable[Row]) -> list[Finding]:
    """Show rows to a watcher; return what it found."""
    return [finding for one in rows for finding in watcher.update(min(one.values(), key=_step).step, one)]


def _step(record: StepRecord) -> int:
    return record.step


def opened(findings: Iterable[Finding]) -> list[Verdict]:
    """The verdicts that began."""
    return [finding.verdict for finding in findings if not finding.ended]

"""The rules other tools use today, for `bench/detection/`: each says, from own times, whom it would name when.

They are kindly treated: a rule that fires again on the same rank within 50 steps counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Steps between two looks of the rules that look at intervals.
PERIOD = 50


class Alarm(NamedTuple):
    """One alarm: the step at whose end it is raised, the job, and the rank it names; −1 for none."""

    step: int
    job: int
    rank: int


def relative_score(own: Floats) -> Iterator[Alarm]:
    """Report a rank whose speed over the last 50 steps is below 0.75 of the fastest one's."""
    for end, rows in _periods(own):
        middles = np.median(rows, axis=0)
        yield from _alarms_at(end, middles.min(axis=1, keepdims=True) / middles < 0.75)


def z_score(own: Floats) -> Iterator[Alarm]:
    """Report a rank more than three standard deviations above the mean of all ranks, at any step."""
    spread = np.maximum(own.std(axis=2, keepdims=True), 1e-12)
    yield from _every_step((own - own.mean(axis=2, keepdims=True)) / spread > 3.0)


def mad_score(own: Floats) -> Iterator[Alarm]:
    """Report a rank whose modified z-score (median absolute deviation) is above 3.5, at any step."""
    away = own - np.median(own, axis=2, keepdims=True)
    mad = np.maximum(np.median(np.abs(away), axis=2, keepdims=True), 1e-12)
    yield from _every_step(0.6745 * away / mad > 3.5)


def job_change(own: Floats) -> Iterator[Alarm]:
    """Report the job when its steps take 10% longer than 50 steps before; no rank is named."""
    before: Floats | None = None
    for end, rows in _periods(own):
        now = rows.max(axis=2).mean(axis=0)
        if before is not None:
            for job in np.flatnonzero(now > 1.1 * before):
                yield Alarm(end, int(job), -1)
        before = now


def phase_share(own: Floats) -> Iterator[Alarm]:
    """Report the rank that waits least when ranks wait for a quarter of their steps on average over 50 steps."""
    for end, rows in _periods(own):
        waits = (1.0 - rows / rows.max(axis=2, keepdims=True)).mean(axis=0)
        for job in np.flatnonzero(waits.mean(axis=1) > 0.25):
            yield Alarm(end, int(job), int(waits[job].argmin()))


RULES: dict[str, Callable[[Floats], Iterator[Alarm]]] = {
    "relative score < 0.75": relative_score,
    "z > 3": z_score,
    "MAD > 3.5": mad_score,
    "job 10% slower": job_change,
    "phase share > 25%": phase_share,
}


def _periods(own: Floats) -> Iterator[tuple[int, Floats]]:
    for begin in range(0, len(own) - PERIOD + 1, PERIOD):
        yield begin + PERIOD - 1, own[begin : begin + PERIOD]


def _alarms_at(step: int, late: NDArray[np.bool_]) -> Iterator[Alarm]:
    for job, rank in np.argwhere(late):
        yield Alarm(step, int(job), int(rank))


def _every_step(late: NDArray[np.bool_]) -> Iterator[Alarm]:
    last = np.full(late.shape[1:], -PERIOD)
    for step, row in enumerate(late):
        fresh = row & (step - last >= PERIOD)
        last[fresh] = step
        yield from _alarms_at(step, fresh)

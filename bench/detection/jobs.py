"""Jobs for `bench/detection/`: own times of many independent jobs side by side, healthy or with a fault injected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCK = 32

KINDS = {
    "white": "independent",
    "spikes": "1% spikes, 1.2–4.5×",
    "busy": "busy machine: 15% of steps 1.2–3.3×",
    "ar": "autocorrelation 0.9",
    "ar_spikes": "autocorrelation 0.9 and 1% spikes",
    "heavy": "Student t, 3 degrees",
    "static": "constant ±3% spread",
    "pauses": "a 2× pause every 50 steps, on every rank",
    "unlike": "one rank in eight jitters three times as much",
    "mixed": "half of it independent, half of autocorrelation 0.9",
    "states": "a rank in turn 8 to 16% slower for a dozen steps",
}

LASTS, RESTS = 12.0, 36.0
# Mean steps of such a state and between two, and what it adds to the log own time: cores that share a physical one.
STATE = (0.08, 0.15)

FAULTS = {
    "none": "healthy",
    "slow": "one rank slow from a step on",
    "from_0": "one rank slow from the first step on",
    "drift": "one rank slower and slower, over 300 steps",
    "two": "two ranks slow at once",
    "moves": "the slow rank changes every 100 steps",
    "pauses": "one rank pauses for two steps' time every ten steps (garbage collection)",
    "neighbour": "a noisy neighbour: one rank slow in bursts of 40 steps of 60",
    "stalls": "input stalls: 40% of one rank's steps",
    "link": "a slow link: all steps, no own time",
}


@dataclass(frozen=True)
class Noise:
    """What healthy own times look like.

    Args:
        kind: One of `KINDS`.
        jitter: Standard deviation of one log own time, without spikes, pauses and spread.
        ranks: Ranks per job.
    """

    kind: str
    jitter: float
    ranks: int


@dataclass(frozen=True)
class Fault:
    """What goes wrong.

    Args:
        kind: One of `FAULTS`.
        slowdown: 0.12 means 12% longer; what it means on average over all steps is up to the kind.
        onset: First step of the fault.
    """

    kind: str = "none"
    slowdown: float = 0.0
    onset: int = 0


def own_times(rng: np.random.Generator, noise: Noise, fault: Fault, steps: int, jobs: int) -> Iterator[Floats]:
    """Yield log own times [jobs, ranks], one step at a time; the culprits are those of `culprits`."""
    extra = log_extra(fault, steps)
    for step, row in enumerate(_healthy(rng, noise, steps, jobs)):
        now = culprits(fault, step, noise.ranks)
        if extra[step] and now:
            row[:, now] += extra[step] if fault.kind != "stalls" else extra[step] * (rng.random((jobs, len(now))) < 0.4)
        yield row


def culprits(fault: Fault, step: int, ranks: int) -> list[int]:
    """Return who is at fault at a step; ranks are alike, so it is always the first ones."""
    if step < fault.onset or fault.kind in ("none", "link"):
        return []
    if fault.kind == "two":
        return [0, 1]
    return [(step - fault.onset) // 100 % ranks] if fault.kind == "moves" else [0]


def log_extra(fault: Fault, steps: int) -> Floats:
    """Return what the culprit's log own time grows by at each step, [steps]."""
    since = np.arange(steps) - fault.onset
    full = np.log1p(fault.slowdown)
    extra = {
        "none": 0.0 * since,
        "link": 0.0 * since,
        "drift": full * np.clip(since / 300, 0, 1),
        "pauses": np.log(3.0) * (since % 10 == 9),
        "neighbour": full * (since % 60 < 40),
        "stalls": np.full(steps, np.log1p(fault.slowdown / 0.4)),
    }.get(fault.kind, np.full(steps, full))
    return np.where(since >= 0, extra, 0.0)


def _healthy(rng: np.random.Generator, noise: Noise, steps: int, jobs: int) -> Iterator[Floats]:
    shape, jitter, kind = (jobs, noise.ranks), noise.jitter, noise.kind
    state = rng.normal(0, jitter, shape)
    spread = np.log(rng.uniform(0.97, 1.03, shape))
    phase = rng.integers(0, 50, shape)
    held = np.full(jobs, -1)  # whose turn it is to be slower, -1: nobody's
    height = rng.uniform(*STATE, jobs)
    wide = np.where(np.arange(noise.ranks) % 8 == 1, 3.0, 1.0)
    for begin in range(0, steps, BLOCK):
        rows = rng.standard_normal((BLOCK, *shape)) * jitter
        if kind == "heavy":
            rows = np.clip(rng.standard_t(3, rows.shape) * jitter / np.sqrt(3), -3, 3)
        if kind in ("spikes", "ar_spikes"):
            late = (rng.random(rows.shape) < 0.01) * rng.uniform(0.2, 1.5, rows.shape)
        elif kind == "busy":
            late = (rng.random(rows.shape) < 0.15) * rng.uniform(0.2, 1.2, rows.shape)
        for index in range(min(BLOCK, steps - begin)):
            row = rows[index]
            if kind in ("ar", "ar_spikes", "mixed"):
                row = state = 0.9 * state + np.sqrt(1 - 0.9**2) * row
            if kind == "mixed":
                row = (state + rng.standard_normal(shape) * jitter) / np.sqrt(2.0)
            elif kind in ("spikes", "ar_spikes", "busy"):
                row = row + late[index]
            elif kind == "static":
                row = row + spread
            elif kind == "pauses":
                row = row + np.log(2) * ((begin + index + phase) % 50 == 0)
            elif kind == "unlike":
                row = row * wide
            elif kind == "states":
                ends = rng.random(jobs) < np.where(held >= 0, 1.0 / LASTS, 1.0 / RESTS)
                height = np.where(ends, rng.uniform(*STATE, jobs), height)
                held = np.where(ends, np.where(held >= 0, -1, rng.integers(0, noise.ranks, jobs)), held)
                row = row + height[:, None] * (np.arange(noise.ranks) == held[:, None])
            yield row.copy()

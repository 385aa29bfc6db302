"""Which rank is the slowest for good: four tests that chance alone passes in less than one trace in 500.

Each looks where another is weak. Counting in how many steps a rank was the slowest needs no idea of the noise, but many
steps; comparing all times (Mann and Whitney), or only the fastest steps, finds a rank behind pauses that hit everybody
now and then; measuring the lead in units of the noise works from three steps on, where the noise is small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from ringside.doctor.kineto_intervals import Floats
from ringside.monitor.excess import log_excess
from ringside.monitor.screen import EFFECT
from ringside.monitor.student import student

CHANCE = 0.002
"""The probability with which a job without a culprit may give one, per trace."""
TESTS = 4
LEAST_LEAD = 0.1
"""In few steps a rank must be so much slower than each other rank, as a logarithm ..."""
UNLIKE = 0.02
"""... and ranks without any fault may differ so much for good."""
MANY = 10
"""Steps from which the fastest of them are compared: so large a share of them."""
FAST = 0.3
RIVALS = 32
"""Other ranks that are compared one by one: the slowest of them, for no others come near."""


def persistent_rank(own_s: Floats) -> int | None:
    """Return the rank that is slower than all others for good; None where chance or noise may explain it.

    Args:
        own_s: Own times, float64 [steps, ranks], seconds, without gaps.
    """
    steps, ranks = own_s.shape
    excess = log_excess(own_s)
    rank = int(np.argmax(np.median(excess, axis=0)))
    if min(float(np.median(half)) for half in np.array_split(excess[:, rank], 2)) < EFFECT:
        return None
    allowed = CHANCE / ranks / TESTS
    logs = np.log(own_s)
    held = (
        _slowest_so_often(logs, rank) < allowed
        or (steps >= MANY and min(_against(logs, rank, _above), _against(logs, rank, _few_fast)) < allowed)
        or _lead(logs, rank, allowed)
    )
    return rank if held else None


def chance(times: int, steps: int, probability: float) -> float:
    """Return the probability of at least `times` in `steps` independent steps."""
    return sum(
        math.comb(steps, count) * probability**count * (1 - probability) ** (steps - count)
        for count in range(times, steps + 1)
    )


def clumping(values: Floats) -> float:
    """Return how many steps in a row count as one, because noise lasts longer than a step: at least 1.

    It is (1 + r) / (1 − r) of the correlation r between neighbouring steps, a few steps' bias taken off.
    """
    centred = values - values.mean()
    power = float((centred * centred).sum())
    if len(values) < MANY or power <= 0.0:
        return 1.0
    correlation = float((centred[1:] * centred[:-1]).sum()) / power + 1.0 / len(values)
    correlation = min(max(correlation * (1.0 + 3.0 / len(values)), 0.0), 0.95)
    return (1.0 + correlation) / (1.0 - correlation)


def _slowest_so_often(logs: Floats, rank: int) -> float:
    """Probability that one rank of many alike is the slowest in so many steps."""
    steps, ranks = logs.shape
    slowest = logs.argmax(axis=1) == rank
    clump = clumping(slowest.astype(np.float64))
    return chance(int(slowest.sum() / clump), math.ceil(steps / clump), 1.0 / ranks)


def _against(logs: Floats, rank: int, test: Callable[[Floats, Floats], float]) -> float:
    """The largest probability that a test gives for a rank against each of those that are slow as well."""
    order = [int(other) for other in np.argsort(-np.median(logs, axis=0)) if other != rank]
    return max(test(logs[:, rank], logs[:, other]) for other in order[:RIVALS])


def _above(own: Floats, others: Floats) -> float:
    """Probability that a rank's times lie so far above another's, in the order of size (Mann and Whitney)."""
    wins = float((own[:, None] > others).sum() + 0.5 * (own[:, None] == others).sum())
    pairs, clump = len(own) * len(others), max(clumping(own), clumping(others))
    spread = math.sqrt(pairs * (len(own) + len(others) + 1) / 12.0 * clump)
    return 0.5 * math.erfc((wins - pairs / 2.0) / spread / math.sqrt(2.0))


def _few_fast(own: Floats, others: Floats) -> float:
    """Probability that so few of the fastest steps are a rank's own.

    Whatever interrupts a process only makes a step longer: its fastest steps show what its own work takes.
    """
    both = np.concatenate([own, others])
    fast = both <= np.quantile(both, FAST)
    clump = max(clumping(fast[: len(own)].astype(np.float64)), clumping(fast[len(own) :].astype(np.float64)))
    steps, drawn, mine = math.ceil(len(own) / clump), int(fast.sum() / clump), int(fast[: len(own)].sum() / clump + 0.5)
    ways = sum(math.comb(steps, few) * math.comb(steps, drawn - few) for few in range(min(mine, drawn) + 1))
    return ways / math.comb(2 * steps, drawn)


def _lead(logs: Floats, rank: int, allowed: float) -> bool:
    """Whether it leads each other rank, step by step, by far more than their distance varies."""
    steps, ranks = logs.shape
    leads = logs[:, [rank]] - np.delete(logs, rank, axis=1)
    if leads.mean(axis=0).min() < LEAST_LEAD or leads.min() < EFFECT:
        return False
    clump = max(clumping(column) for column in leads.T)
    needed = float(student(NormalDist().inv_cdf(1.0 - allowed), np.array(float((steps - 1) * (ranks - 1)))))
    noise = math.sqrt(float(leads.var(axis=0, ddof=1).mean()) / steps * clump + UNLIKE**2)
    return bool(leads.mean(axis=0).min() / noise >= needed)

"""What would change in a training step if one thing about it were different: `what_if(step, change)` -> `Answer`.

A step is work and what is left of the synchronisation after it. All ranks wait for the slowest, so work is the mean
over steps of the longest own time: recorded own times are replayed, as the monitor's prices are. What is left of the
synchronisation is `buckets.exposed_s` of one bucket's price. Both ends of a difference are priced with the same
figures, which are wrong together: the band of the difference is that of the figures, not of two prices side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringside.predict.band import Band
from ringside.predict.options import Option, with_measured
from ringside.predict.what_if_price import Exposed, chosen, exposed, moved
from ringside.predict.what_if_step import Change, Floats, Step, changed

__all__ = ["Answer", "Change", "Step", "changed", "what_if", "work_delta"]

DAY_S = 86_400.0
CERTAIN = 1.96  # standard errors of a mean, for 95 %


@dataclass(frozen=True, eq=False)
class Answer:
    """The difference.

    Args:
        before: The step as it is.
        after: As it would be.
        delta: What a step takes longer, seconds, with its band; below 0: less.
        work_delta: Of that, own work.
        left: What is left of the synchronisation, before and after.
        extrapolated: Why no data supports it; empty where data does.
    """

    before: Step
    after: Step
    delta: Band
    work_delta: Band
    left: tuple[Exposed, Exposed]
    extrapolated: tuple[str, ...]

    @property
    def step_s(self) -> tuple[float, float]:
        """What a step takes before and after, seconds."""
        return self.before.work_s + self.left[0].seconds.value, self.after.work_s + self.left[1].seconds.value

    @property
    def knows_work(self) -> bool:
        """Whether computation is known; where it is not, nothing can be said of a day."""
        return self.before.work_s > 0

    @property
    def rank_hours_per_day(self) -> Band | None:
        """Rank-hours that a day of the slower of the two spends on the difference; below 0: that it could save.

        None: computation is not known.
        """
        if not self.knows_work:
            return None
        whole, faster = self.after.topology.ranks * DAY_S / 3600.0, min(self.step_s)
        return Band(*(whole * delta / (faster + abs(delta)) for delta in self.delta.ends))


def what_if(step: Step, change: Change) -> Answer:
    """Return what a change would do to a step.

    Raises:
        UsageError: The change cannot be: no such rank, link, rail, algorithm; the line says which.
    """
    after = changed(step, change)
    left = _left(step, after, change)
    work = work_delta(step, after)
    ends = [b - a for a, b in zip(left[0].seconds.ends, left[1].seconds.ends, strict=True)]
    moves = Band(ends[0], min(ends), max(ends))
    delta = Band(*(a + b for a, b in zip(work.ends, moves.ends, strict=True)))
    why = () if change.of_work and step.recorded else tuple(dict.fromkeys(filter(None, (one.why for one in left))))
    return Answer(step, after, delta, work, left, why)


def _left(before: Step, after: Step, change: Change) -> tuple[Exposed, Exposed]:
    """Return what is left of the synchronisation; of a recorded run as it was seen, moved as the prices move."""
    if before.exposed_s is None:
        return _priced(before, after)
    seen = _mean(before.exposed_s)
    if change.of_work:
        return Exposed(None, seen, ""), Exposed(None, seen, "")
    priced = _priced(before, after)
    then = _moved(seen, *(one.seconds for one in priced), alike=_alike(before, after))
    why = priced[1].why or "the run measured only what it had; the change is priced on its topology"
    fixed = Band(seen.value, seen.value, seen.value)
    return Exposed(priced[0].bucket, fixed, ""), Exposed(priced[1].bucket, then, why)


def _alike(before: Step, after: Step) -> bool:
    """Whether both sides of a difference are wrong together: the same messages, over other links."""
    ways = [(one.buckets, one.algorithm, one.topology.ranks) for one in (before, after)]
    return ways[0] == ways[1]


def _moved(seen: Band, before: Band, after: Band, *, alike: bool) -> Band:
    """Return what was seen as it would be: by the ratio of prices, as sure as the second is beside the measured one."""
    if before.value <= 0:
        return seen
    ratios = [b / a for a, b in zip(before.ends if alike else (before.value,) * 3, after.ends, strict=True)]
    return Band(seen.value * ratios[0], seen.value * min(ratios), seen.value * max(ratios))


def _priced(before: Step, after: Step) -> tuple[Exposed, Exposed]:
    """Return what is left by price; what was measured before moves both."""
    first, second = (chosen(one.topology, one.algorithm, one.bucket_bytes) for one in (before, after))
    seen = None if first is None else with_measured(first, before.measured)
    return _exposed(before, moved(first, seen)), _exposed(after, moved(second, seen))


def _exposed(step: Step, option: Option | None) -> Exposed:
    return exposed(option, step.topology, step.bucket_bytes, step.buckets, step.work_s)


def work_delta(before: Step, after: Step) -> Band:
    """Return by how much the slowest rank's own time grows, with the band that the steps' scatter leaves."""
    if before.own_s.shape[0] == 1:
        more = after.work_s - before.work_s
        return Band(more, more, more)
    return _mean(after.own_s.max(axis=1) - before.own_s.max(axis=1))


def _mean(values: Sequence[float] | Floats) -> Band:
    """Return the mean of what single steps say, with its 95 % band."""
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    error = CERTAIN * float(found.std(ddof=1)) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return Band(mean, mean - error, mean + error)

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

from ringside.errors import UsageError
from ringside.predict.band import Band
from ringside.predict.plan.measured import moved, tilted, with_measured
from ringside.predict.plan.options import TREES, Option, schedule_for
from ringside.predict.plan.plan import choose_option
from ringside.predict.simulation.simulate import simulate
from ringside.predict.simulation.timeline import Timeline
from ringside.predict.what_if.price import Exposed, chosen, exposed, lawful
from ringside.predict.what_if.step import Floats, PredictedStep, StepChange, changed

__all__ = ["Answer", "PredictedStep", "StepChange", "changed", "what_if", "work_delta"]


DAY_S = 86_400.0
CERTAIN = 1.96  # standard errors of a mean, for 95 %
TILT = CERTAIN / math.sqrt(2.0)  # two figures that go apart have the square root of two of one's spread
NOTHING = Band(0.0, 0.0, 0.0)
Options = tuple[Option | None, Option | None]
"""How buckets are reduced before and after; None: there is one rank."""


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

    before: PredictedStep
    after: PredictedStep
    delta: Band
    work_delta: Band
    left: tuple[Exposed, Exposed]
    extrapolated: tuple[str, ...]

    @property
    def step_s(self) -> tuple[float, float]:
        """What a step takes before and after, seconds."""
        return self.before.work_s + self.left[0].seconds.value, self.after.work_s + self.left[1].seconds.value

    @property
    def steps(self) -> tuple[Band, Band]:
        """The same with bands: those of the scatter of recorded work, and of what is left of the synchronisation."""
        before, after = (
            Band(*(a + b for a, b in zip(work(step).ends, left.seconds.ends, strict=True)))
            for step, left in zip((self.before, self.after), self.left, strict=True)
        )
        return before, after

    @property
    def knows_work(self) -> bool:
        """Whether computation is known; where it is not, nothing follows for a day."""
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


def what_if(step: PredictedStep, change: StepChange) -> Answer:
    """Return what a change would do to a step.

    Raises:
        UsageError: The change cannot be: no such rank, link, rail, algorithm; the line names it.
    """
    after = changed(step, change)
    first, second, grows = _remaining(step, after, change)
    longer = work_delta(step, after)
    delta = Band(*(a + b for a, b in zip(longer.ends, grows.ends, strict=True)))
    why = () if change.of_work and step.recorded else tuple(dict.fromkeys(filter(None, (first.why, second.why))))
    return Answer(step, after, delta, longer, (first, second), why)


def _remaining(before: PredictedStep, after: PredictedStep, change: StepChange) -> tuple[Exposed, Exposed, Band]:
    """Return what is left of the synchronisation, and by how much that grows.

    Of a recorded run it is what was seen and what the prices grow by, which its measurements moved; never less than 0.
    """
    seen = None
    if before.exposed_s is not None:
        mean = _mean(before.exposed_s)
        seen = Band(mean.value, max(mean.low, 0.0), mean.high)
        if change.of_work:
            return Exposed(None, seen, ""), Exposed(None, seen, ""), NOTHING
    # What was measured before moves how buckets are priced on both sides.
    old, new = (chosen(step.topology, step.algorithm, step.bucket_bytes) for step in (before, after))
    run = None if old is None else with_measured(old, before.measured)
    options = old and moved(old, run), new and moved(new, run)
    first, second = (_exposed(step, option) for step, option in zip((before, after), options, strict=True))
    if seen is None:
        return first, second, _ordered(*(b - a for a, b in zip(first.seconds.ends, second.seconds.ends, strict=True)))
    grows = _growth(before, after, options, seen)
    then = Band(*(max(a + b, 0.0) for a, b in zip(seen.ends, grows.ends, strict=True)))
    why = second.why or "the run measured only what it had; the change is priced on its topology"
    return Exposed(first.bucket, seen, ""), Exposed(second.bucket, then, why), grows


def _ordered(value: float, *others: float) -> Band:
    """Return a value with the least and the most of all as its band."""
    return Band(value, min(value, *others), max(value, *others))


def _growth(before: PredictedStep, after: PredictedStep, options: Options, seen: Band) -> Band:
    """Return by how much a recorded run would have more left of its synchronisation.

    The same messages over other links are wrong together on both sides; what a change does to them then hangs on how
    much of their time is latency and how much is wire, and on how steady the run was. Other messages are as sure as
    their own price is.
    """
    alike = [(step.buckets, step.algorithm, step.topology.ranks) for step in (before, after)]
    if alike[0] == alike[1]:
        tilts = []  # growth if latency is more of a message's time by so many standard deviations, seconds
        for share in (0.0, -TILT, TILT):
            pair = [option and tilted(option, share) for option in options]
            left = [_exposed(step, option).seconds for step, option in zip((before, after), pair, strict=True)]
            tilts.append(left[1].value - left[0].value)
        ends = [more * end / seen.value for more in tilts for end in seen.ends] if seen.value > 0 else tilts
        found = _ordered(tilts[0], *ends)
    else:
        first, second = (_exposed(step, option).seconds for step, option in zip((before, after), options, strict=True))
        found = Band(*(end - first.value for end in second.ends))
    return Band(*(max(end, -seen.value) for end in found.ends))


def _exposed(step: PredictedStep, option: Option | None) -> Exposed:
    return exposed(option, step.topology, step.bucket_bytes, step.buckets, step.work_s)


def work(step: PredictedStep) -> Band:
    """Return the slowest rank's own time, with the band that the steps' scatter leaves; a single step has none."""
    return _mean(step.own_s.max(axis=1))


def work_delta(before: PredictedStep, after: PredictedStep) -> Band:
    """Return by how much the slowest rank's own time grows, with the band that the steps' scatter leaves."""
    return _mean(after.own_s.max(axis=1) - before.own_s.max(axis=1))


def _mean(values: Sequence[float] | Floats) -> Band:
    """Return the mean of what single steps took, with its 95 % band."""
    found = np.asarray(values, dtype=np.float64)
    mean = float(found.mean())
    error = CERTAIN * float(found.std(ddof=1)) / math.sqrt(len(found)) if len(found) > 1 else 0.0
    return Band(mean, mean - error, mean + error)


# -------------------------------------------------------------------------------------------------
# A step's synchronisation played: who is guilty, and the times for a picture before and after.

MOST_RANKS = 4096  # a larger simulation takes seconds
SEGMENTS = 8  # of what is pipelined: a tree, a tensor through a switch


def played(step: PredictedStep) -> Timeline | None:
    """Return one bucket's all-reduce, each rank as late as its own work is longer than the shortest.

    A library's algorithm is played by the schedule that is like it (`options.schedule_for`).

    Returns:
        None where there is nothing to play: one rank, or more than `MOST_RANKS`.
    """
    topology = step.topology
    if not 2 <= topology.ranks <= MOST_RANKS:
        return None
    size, plain = step.bucket_bytes, lawful(topology)
    name = choose_option(plain, size, step.algorithm).name
    segments = SEGMENTS if name in (*TREES, "nvls") else 1
    own = np.median(step.own_s, axis=0)
    late = {rank: float(more) for rank, more in enumerate(own - own.min()) if more > 0}
    try:
        return simulate(schedule_for(plain, name), topology, size, late=late, segments=segments)
    except UsageError:  # too large to be played
        return None

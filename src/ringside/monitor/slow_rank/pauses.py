"""A rank that pauses again and again: short in its typical step and yet what the others wait for.

Garbage collection, checkpoints, evaluation and logging on one rank make one of its steps in ten or fifty several times
as long. Means and medians of windows must not count that (`window_test.py`: three spikes are no slow rank); what counts
here is how often it happens to one rank and not to the others, and what the job loses by it. On Python's collector as a
cause of stragglers: J. Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis (OSDI 2025).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.monitor.price import spared_rank_seconds
from ringside.monitor.stats import Floats, deviation, divergence, known_or_0, median, usable
from ringside.monitor.verdict import Verdict
from ringside.text import duration

KEPT = 480
"""Steps that are looked at."""

EVERY = 24
"""A look every so many steps."""

TYPICAL = 48
"""Steps whose median a pause is held against."""

LATE, ROUGH, BEYOND_OTHERS = 1.5, 6.0, 1.25
"""A step is late from so many times the rank's typical one on, and so many of its standard deviations above it; it is
the rank's own if it takes so many times what the slowest of the others needs."""

FEWEST, SPAN = 6, 96
"""Pauses, and steps from the first to now, below which nothing is said."""

LEAST_LOSS = 0.05
"""The share of the job's time that they cost, at least."""

WEIGHTY = 0.5
"""Of all pauses, those count that are at least this share of the rank's own median one: a little pause here and there
on another rank is no other case of what this rank does."""

RARE = 13.0
"""Nepers: how rarely one rank of many alike has so many of all pauses, at one look."""

PARTS, PART_SHARE = 3, 1 / 6
"""Of each third of the span so many of the pauses, at least: a burst is over before anybody reads of it."""

SILENCE = 8.0
"""After so many times the usual distance without one they are over."""


class Rhythm(NamedTuple):
    """How a rank pauses.

    Args:
        first: Number of the step, from 1, of the first pause that counts.
        pauses: How many; a pause of several steps is one.
        typical: The rank's typical step, seconds.
        bar: From how many seconds on a step was late.
        extra: What they add up to beyond typical steps, seconds.
        lost: What the job would have been spared without them, seconds.
    """

    first: int
    pauses: int
    typical: float
    bar: float
    extra: float
    lost: float


class Pauses:
    """Counts late steps of ranks, one step at a time; memory is O(ranks).

    Args:
        ranks: How many there are.

    Attributes:
        steps: How many steps were seen.
        open: Which ranks are known to pause, bool [ranks].
        rhythm: How, by rank, of those in `open`.
        last: Number of the step of each rank's newest pause, int [ranks].
    """

    def __init__(self, ranks: int) -> None:
        self.steps = 0
        self.open = np.zeros(ranks, dtype=bool)
        self.rhythm: dict[int, Rhythm] = {}
        self.last = np.zeros(ranks, dtype=np.int64)
        self._own = np.full((TYPICAL, ranks), np.nan)
        self._typical, self._bar = np.full((2, ranks), np.inf)
        self._late, self._begun = np.zeros((2, KEPT, ranks), dtype=bool)
        self._extra, self._lost = np.zeros((2, KEPT, ranks), dtype=np.float32)
        self._whole = np.zeros(KEPT)

    def update(self, own: Floats, busy: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Take in one step; return who is known to pause from now on, and who has stopped, bool [ranks] each.

        Args:
            own: Own times in seconds, [ranks]; NaN where missing.
            busy: Ranks that are known to be slow anyhow: nothing counts that they do, [ranks].
        """
        self.steps += 1
        self._own[self.steps % TYPICAL] = own
        self._count(own, busy)
        opened = closed = np.zeros(self.open.shape, dtype=bool)
        if self.steps % EVERY == 0:
            if self.steps >= SPAN:
                opened, closed = self._judge(busy)
            self._learn()
        return opened, closed

    def reset(self, rank: int) -> None:
        """Discard what a rank did so far: it is known for something else."""
        self.open[rank] = False
        self.rhythm.pop(rank, None)
        for kept in (self._late, self._begun, self._extra, self._lost):
            kept[:, rank] = 0

    def _count(self, own: Floats, busy: NDArray[np.bool_]) -> None:
        slot, before = self.steps % KEPT, (self.steps - 1) % KEPT
        self._whole[slot] = np.fmax.reduce(own, initial=0.0)
        self._late[slot] = self._begun[slot] = self._extra[slot] = self._lost[slot] = 0
        if not (own > self._bar).any():
            return
        times = known_or_0(own)
        ordered = np.sort(times)
        slowest, second = ordered[-1], ordered[-2:][0]  # a rank alone is both, and so never late
        others = np.where(times >= slowest, second, slowest)
        late = (times > self._bar) & (times > BEYOND_OTHERS * others) & ~busy
        self._late[slot] = late
        self.last[late] = self.steps
        self._begun[slot] = late & ~self._late[before]
        typical = np.where(late, self._typical, times)
        self._extra[slot] = times - typical
        self._lost[slot] = np.where(late, times - np.maximum(others, typical), 0.0)

    def _learn(self) -> None:
        self._typical = median(self._own)
        bar = np.maximum(LATE * self._typical, self._typical + ROUGH * deviation(self._own - self._typical))
        self._bar = np.where(np.isfinite(bar), bar, np.inf)

    def _judge(self, busy: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        opened, closed = np.zeros_like(self.open), np.zeros_like(self.open)
        for rank in self.rhythm:
            closed[rank] = self._is_over(rank)
        for rank in np.flatnonzero(closed).tolist():
            self.reset(rank)
        counts = self._begun.sum(axis=0)
        loss = self._lost.sum(axis=0) / np.maximum(self._whole.sum(keepdims=True), 1e-9)
        for rank in np.flatnonzero((counts >= FEWEST) & (loss >= LEAST_LOSS) & ~self.open & ~busy).tolist():
            # Of all pauses those that weigh as much as this rank's own do.
            weight = WEIGHTY * np.median(self._extra[self._begun[:, rank], rank])
            weighty = self._begun & (self._extra >= weight)
            if not stands_out(int(weighty[:, rank].sum()), int(weighty.sum()), len(counts)):
                continue
            if (rhythm := self._rhythm(rank)) is not None:
                self.rhythm[rank] = rhythm
                opened[rank] = True
        self.open |= opened
        return opened, closed

    def _rhythm(self, rank: int) -> Rhythm | None:
        """Return the pauses of the steps that are kept, if they go on all the time."""
        numbers = self._numbers(rank)
        span = self.steps - int(numbers[0]) + 1
        parts = np.bincount((numbers - numbers[0]) * PARTS // span, minlength=PARTS)
        if span < SPAN or parts.min() < PART_SHARE * len(numbers):
            return None
        return Rhythm(
            first=int(numbers[0]),
            pauses=len(numbers),
            typical=float(self._typical[rank]),
            bar=float(self._bar[rank]),
            extra=float(self._extra[:, rank].sum()),
            lost=float(self._lost[:, rank].sum()),
        )

    def _is_over(self, rank: int) -> bool:
        numbers = self._numbers(rank)
        if len(numbers) < FEWEST:
            return True
        distance = float(numbers[-1] - numbers[0]) / (len(numbers) - 1)
        return self.steps - int(numbers[-1]) > max(SILENCE * distance, EVERY)

    def _numbers(self, rank: int) -> NDArray[np.int64]:
        """The numbers of the steps at which a rank's pauses began, as far as they are kept, ascending."""
        oldest = max(self.steps - KEPT, 0) + 1
        numbers = np.arange(oldest, self.steps + 1)
        kept: NDArray[np.int64] = numbers[self._begun[numbers % KEPT, rank]]
        return kept


def stands_out(count: int, total: int, ranks: int) -> bool:
    """Whether one rank has more of all pauses than chance gives to one of several ranks alike.

    Chernoff's bound (1952) on the tail of a binomial of `total` pauses, each of which is this rank's once in `ranks`
    times; one that was not seen is added.

    Args:
        count: Pauses of the rank.
        total: Pauses of all ranks.
        ranks: How many ranks there are.
    """
    return (total + 1) * divergence(count / (total + 1), 1.0 / ranks) >= RARE + math.log(ranks)


# -------------------------------------------------------------------------------------------------
# From a rank that pauses again and again to a verdict, its price while it goes on, and both again over a whole run.

ADVICE = (
    "Look at what it does in those steps that the others do not: garbage collection (gc.freeze(), or collect on all "
    "ranks in the same step), checkpoints, evaluation, logging; do it on all ranks at once, or beside training."
)

WRITING_EVIDENCE = ("written_bytes_per_pause", "others_written_bytes_per_pause")
"""What the cause adds to the evidence where the rank writes in its pauses (`ringside.monitor.causes`)."""


def judge_pauses(rank: int, rhythm: Rhythm, ranks: int, *, since_step: int, detected_step: int) -> Verdict:
    """Return the verdict on a rank that pauses.

    Args:
        rank: The culprit.
        rhythm: How it pauses.
        ranks: How many ranks wait for it, with itself.
        since_step: Training step of the first pause.
        detected_step: Training step at which it was noticed.
    """
    span = detected_step - since_step + 1
    verdict = Verdict(
        kind="slow_rank",
        ranks=[rank],
        since_step=since_step,
        detected_step=detected_step,
        excess_ratio=rhythm.extra / max(span * rhythm.typical, 1e-9),
        evidence={"own_seconds": rhythm.typical, "pause_bar_seconds": rhythm.bar, "usual_excess_ratio": 0.0},
        cost_rank_seconds=ranks * rhythm.lost,
        advice=ADVICE,
    )
    return _in_words(verdict, rhythm.pauses, rhythm.extra, span)


def is_of_pauses(verdict: Verdict) -> bool:
    """Tell whether a verdict is on a rank's pauses and not on its typical step."""
    return isinstance(verdict.evidence.get("pause_bar_seconds"), int | float)


def rejudge_pauses(verdict: Verdict, own: ArrayLike) -> Verdict:
    """Return such a verdict judged and priced again on all steps of its episode.

    Args:
        verdict: What was found.
        own: Own times in seconds since the first pause, float [steps, ranks].
    """
    times = usable(own)
    mine = times[:, verdict.ranks[0]]
    late, count = find_pauses(verdict, times)
    if not count:
        return verdict
    typical = float(np.nanmedian(mine))
    extra = float((mine[late] - typical).sum())
    # Whether it writes meanwhile is for all these steps to say, too.
    kept = {name: value for name, value in verdict.evidence.items() if name not in WRITING_EVIDENCE}
    again = msgspec.structs.replace(
        verdict,
        excess_ratio=extra / max(len(times) * typical, 1e-9),
        evidence={**kept, "own_seconds": typical},
        advice=ADVICE,
        cost_rank_seconds=spared_rank_seconds(times, without_pauses(verdict, times)),
    )
    return _in_words(again, count, extra, len(times))


def find_pauses(verdict: Verdict, own: Floats) -> tuple[NDArray[np.bool_], int]:
    """Return which steps of the culprit are late, bool [steps], and how many pauses they are.

    Args:
        verdict: That it pauses.
        own: Own times in seconds, [steps, ranks]; NaN where missing.
    """
    with np.errstate(invalid="ignore"):
        late: NDArray[np.bool_] = own[:, verdict.ranks[0]] > float(verdict.evidence["pause_bar_seconds"])
    return late, int(np.count_nonzero(late & ~np.append(False, late[:-1])))


def without_pauses(verdict: Verdict, own: Floats) -> Floats:
    """Return own times, [steps, ranks], with the late steps of the culprit as long as its typical one."""
    repaired: Floats = own.copy()
    rank = verdict.ranks[0]
    late, _ = find_pauses(verdict, own)
    repaired[late, rank] = np.minimum(repaired[late, rank], float(verdict.evidence["own_seconds"]))
    return repaired


class PauseMeter:
    """The price of a rank's pauses while the run goes on.

    Args:
        verdict: What was found.

    Attributes:
        rank_seconds: The price so far.
    """

    def __init__(self, verdict: Verdict) -> None:
        self.rank_seconds = verdict.cost_rank_seconds
        self._verdict = verdict

    def add(self, own: ArrayLike) -> None:
        """Take in steps, float [steps, ranks] of own seconds."""
        times = usable(own)
        self.rank_seconds += spared_rank_seconds(times, without_pauses(self._verdict, times))


def _in_words(verdict: Verdict, count: int, extra: float, span: int) -> Verdict:
    each, distance = extra / count, max(round(span / count), 1)
    return msgspec.structs.replace(
        verdict,
        cause=f"about every {distance} steps one takes {duration(each)} longer ({count} times so far); "
        "between those it is as fast as ever",
        evidence={**verdict.evidence, "pauses": count, "pause_seconds": each, "steps": span},
    )

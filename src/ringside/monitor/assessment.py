"""How sure a run's record can make us that no rank was a straggler: a verdict, nothing to see, or undecided.

Where the detector named nobody, that means health only if it would have named a straggler in this very run: that
follows from the run's own noise. Nothing else here knows the detector, and the tests hold the promise against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.monitor.causes import PHASES, extra_phase_seconds
from ringside.monitor.run.table import StepTable
from ringside.monitor.stats import Floats, log_excess
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict
from ringside.text import percent

PROMISED = 0.10
"""A rank slower by this ratio is what a run without a straggler must have been able to show."""
LONGEST = 192
"""Steps that the detector's longest mean is of."""
CLEARLY = 11.0
"""Errors of that mean that are enough: fewer than 6 are no verdict, and in 100 trials none above 10.6 was missed."""

MOST_UNCLEAR = PROMISED / 2
"""Of own times: so much in which a rank may have been waiting hides a straggler."""

WARM_UP = 3
FEWEST = 20
"""A rank that was visibly slower was so for this many steps at least, up to the last."""
VISIBLE = 0.10
"""It takes this much longer than the others in most of them ..."""
CHANCE = 0.0002
"""... and by more than chance would show in one rank of all in so many runs, by the error of a mean."""
NEARLY_ALL, MOSTLY = 0.85, 0.6

PHASE_NAMES = {
    "data": "data loading",
    "forward": "forward",
    "backward": "backward",
    "compute": "forward and backward",
    "optimizer": "the optimizer",
}


class Assessment(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's records say about stragglers; `assessment` in `summary.json`.

    Args:
        state: `straggler`: a verdict names one; `none`: none, and one would have been found; `undecided`: neither.
        rank: The rank that was slowest, where it was visibly slower than the others without a verdict.
        excess_ratio: By how much it was slower than the others since then; 0.36 means 36%.
        since_step: Since about which step.
        phase: Where most of its extra time was: one of `PHASES`; empty where that cannot be said.
        phase_ratio: The share of its extra time that was there.
        found_ratio: A rank slower by this would have been found in this run; None where that cannot be promised.
        compared: Whether every rank has another that does the same work; if not, it was compared with its own past.
    """

    state: Literal["straggler", "undecided", "none"]
    rank: int | None = None
    excess_ratio: float | None = None
    since_step: int | None = None
    phase: str = ""
    phase_ratio: float | None = None
    found_ratio: float | None = None
    compared: bool = True


def assess_stragglers(table: StepTable, verdicts: Sequence[Verdict], peers: Sequence[Sequence[int]] = ()) -> Assessment:
    """Return what a run's records say about stragglers.

    Args:
        table: Its step records.
        verdicts: What was found in it.
        peers: Ranks that do the same work, where not all do: only these are compared.
    """
    if any(verdict.ranks and verdict.kind in OWN_TIME_KINDS for verdict in verdicts):
        return Assessment(state="straggler")
    if len(peers) > 1:
        if any(len(ranks) == 1 for ranks in peers):
            return Assessment(state="undecided", compared=False)
        each = [_of_job(assess_stragglers(table.of_ranks(ranks), []), ranks) for ranks in peers]
        # The job's is that of the worst of them: whose slowest rank is the slowest, else who would not show one.
        return max(each, key=lambda found: (found.excess_ratio or 0.0, found.found_ratio is None))
    # What may have been waiting is in own times; where that is much, they show nothing.
    newest = slice(len(table) // 2, None)
    unclear, own = (np.nansum(table[name][newest], axis=0) for name in ("unclear_seconds", "own_seconds"))
    if (unclear > MOST_UNCLEAR * own).any():
        return Assessment(state="undecided")
    found = assess_own_times(table.steps, table["own_seconds"])
    if found.rank is None or found.since_step is None:
        return found
    # The phase in which most of its extra time is; none where no phase holds most.
    extra = extra_phase_seconds(found.rank, table.between(found.since_step))
    total = sum(max(value, 0.0) for value in extra.values())
    phase = max(PHASES, key=lambda name: extra[name])
    share = extra[phase] / total if total > 0 else 0.0
    return msgspec.structs.replace(found, phase=phase, phase_ratio=share) if share >= MOSTLY else found


def _of_job(found: Assessment, peers: Sequence[int]) -> Assessment:
    """Return what was found of a rank among its peers with its number in the job."""
    return found if found.rank is None else msgspec.structs.replace(found, rank=peers[found.rank])


def assess_own_times(steps: NDArray[np.int64], own: Floats) -> Assessment:
    """Return what own times say about stragglers where no verdict names one.

    Args:
        steps: Training steps, ascending, int64 [steps].
        own: Own times, float64 [steps, ranks], seconds; NaN: not known.
    """
    if own.shape[1] < 2:
        return Assessment(state="none")  # there is nobody to compare it with
    found = PROMISED if would_be_found(own) else None
    slowest = _slowest(own)
    if slowest is None:
        return Assessment(state="undecided" if found is None else "none", found_ratio=found)
    rank, row, excess = slowest
    return Assessment(
        state="undecided",
        rank=rank,
        excess_ratio=math.expm1(excess),
        since_step=int(steps[row]),
        found_ratio=found,
    )


def would_be_found(own: Floats, ratio: float = PROMISED) -> bool:
    """Return whether a rank slower than the others by `ratio` for a run's second half would have been found in it.

    It would where the mean of that half's steps, or of `LONGEST` of them, lies `CLEARLY` times its own error above what
    the rank exceeds the others by anyway. The error is that of this run's own noise, of which neighbouring steps may be
    alike.

    Args:
        own: Own times, float64 [steps, ranks], seconds; NaN: not known.
        ratio: 0.1 is 10% slower.
    """
    excess = log_excess(own[WARM_UP:])
    steps = min(len(excess) // 2, LONGEST)
    if steps < FEWEST:
        return False
    for rank in range(excess.shape[1]):
        values = excess[np.isfinite(excess[:, rank]), rank]
        if len(values) < 0.9 * len(excess):
            return False  # too little is known of this rank
        usual = max(float(np.median(values)), 0.0)
        if math.log1p(ratio) - usual < CLEARLY * _error_of_mean(values, steps):
            return False
    return True


def _error_of_mean(values: Floats, count: int) -> float:
    """The standard error of the mean of `count` values in a row like these."""
    centred = values - values.mean()
    power = float((centred * centred).sum())
    if power <= 0:
        return 0.0
    # (1 + r) / (1 - r) neighbours count as one
    correlation = float((centred[1:] * centred[:-1]).sum()) / power
    correlation = min(max(correlation, 0.0), 0.95)
    return math.sqrt(power / len(values) / count * (1 + correlation) / (1 - correlation))


def _slowest(own: Floats) -> tuple[int, int, float] | None:
    """The rank that is visibly slower than the others up to the end, the row since which, and its median log excess."""
    best: tuple[float, int, int] | None = None
    if len(own) < WARM_UP + FEWEST:
        return None
    errors = NormalDist().inv_cdf(1.0 - CHANCE / own.shape[1])
    excess = log_excess(own)
    for rank in range(own.shape[1]):
        rows = np.flatnonzero(np.isfinite(excess[:, rank]))
        rows = rows[rows >= WARM_UP]
        if len(rows) < FEWEST:
            continue
        values = excess[rows, rank]
        # Since when: where the sum of what lies beyond half of the excess is greatest (Page 1955), which is known then.
        since = values
        for height in (math.log1p(VISIBLE), None):
            half = (float(np.median(since)) if height is None else height) / 2
            beyond = np.clip(values - half, -1.0, 1.0)
            begin = min(int(np.argmax(np.cumsum(beyond[::-1])[::-1])), len(values) - FEWEST)
            since = values[begin:]
        error = _error_of_mean(since, len(since))
        mean, middle = float(since.mean()), float(np.median(since))
        if middle >= math.log1p(VISIBLE) and mean >= errors * error and (best is None or middle > best[0]):
            best = middle, rank, int(rows[begin])
    return None if best is None else (best[1], best[2], best[0])


def describe_assessment(found: Assessment) -> str:
    """Return an assessment without a verdict in one or two sentences."""
    if found.state == "undecided" and found.rank is not None and found.excess_ratio is not None:
        amount = "" if found.phase_ratio is None or found.phase_ratio < NEARLY_ALL else "nearly all "
        where = f", {amount or 'mostly '}in {PHASE_NAMES[found.phase]}" if found.phase in PHASE_NAMES else ""
        slower = f"+{percent(found.excess_ratio)} since about step {found.since_step}"
        return f"Rank {found.rank} was slowest: {slower}{where}, but too unsteady to be sure."
    if not found.compared:
        return "Some ranks do work that no other does: these were compared with their own past only."
    if found.state == "none" and found.found_ratio is not None:
        return f"A rank {percent(found.found_ratio)} slower would have been found."
    if found.state == "undecided":
        return f"A rank {percent(PROMISED)} slower might not have been found: too few steps, or too unsteady ones."
    return ""

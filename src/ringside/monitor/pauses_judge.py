"""From a rank that pauses again and again to a verdict, its price while it goes on, and both again over a whole run."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from ringside.monitor.excess import Floats, usable
from ringside.monitor.pauses import Rhythm
from ringside.monitor.price import spared_rank_seconds
from ringside.monitor.verdict import Verdict

ADVICE = (
    "Look at what it does in those steps that the others do not: garbage collection (gc.freeze(), or collect on all "
    "ranks in the same step), checkpoints, evaluation, logging; do it on all ranks at once, or beside training."
)


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
    times, rank = usable(own), verdict.ranks[0]
    mine = times[:, rank]
    late = np.isfinite(mine) & (mine > float(verdict.evidence["pause_bar_seconds"]))
    count = int(np.count_nonzero(late & ~np.append(False, late[:-1])))
    if not count:
        return verdict
    typical = float(np.nanmedian(mine))
    extra = float((mine[late] - typical).sum())
    again = msgspec.structs.replace(
        verdict,
        excess_ratio=extra / max(len(times) * typical, 1e-9),
        evidence={**verdict.evidence, "own_seconds": typical},
        cost_rank_seconds=spared_rank_seconds(times, without_pauses(verdict, times)),
    )
    return _in_words(again, count, extra, len(times))


def without_pauses(verdict: Verdict, own: Floats) -> Floats:
    """Return own times, [steps, ranks], with the late steps of the culprit as long as its typical one."""
    repaired: Floats = own.copy()
    rank = verdict.ranks[0]
    with np.errstate(invalid="ignore"):
        late = repaired[:, rank] > float(verdict.evidence["pause_bar_seconds"])
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
        cause=f"about every {distance} steps one takes {_seconds(each)} longer ({count} times so far); "
        "between those it is as fast as ever",
        evidence={**verdict.evidence, "pauses": count, "pause_seconds": each, "steps": span},
    )


def _seconds(value: float) -> str:
    if value < 0.0995:
        return f"{1e3 * value:.2g} ms"
    return f"{value:.2g} s" if value < 9.95 else f"{value:.0f} s"

"""From an episode of one rank to a verdict: slow hardware or more work, with the numbers that say so, and its price."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from ringside.monitor.price import Meter, cost_rank_seconds
from ringside.monitor.slow_rank.pauses import PauseMeter, is_of_pauses
from ringside.monitor.slow_rank.window_test import EFFECT
from ringside.monitor.stats import Floats, known_median, log_excess
from ringside.monitor.verdict import Verdict

EXPLAINED = 0.7
"""Uneven work is the verdict when sample counts account for this much of the excess."""

SLOW_CAUSE = "its own work takes longer than the same work elsewhere"
SLOW_ADVICE = (
    "Compare this rank's clocks, temperature, CPU steal and neighbours with a healthy rank's; "
    "move the rank to another device or host if they do not explain it."
)
UNEVEN_CAUSE = "it was given more samples per step; per sample it is as fast as the others"
UNEVEN_ADVICE = "Balance the batches: equal samples (or tokens) per rank, or bucket sequences by length."


def judge_excess(
    rank: int, own: Floats, samples: Floats | None, *, since_step: int, detected_step: int, usual: float = 0.0
) -> Verdict:
    """Return the verdict on one rank's episode.

    Args:
        rank: The culprit.
        own: Own times in seconds over the episode so far, float [steps, ranks]; NaN = missing.
        samples: Samples (or tokens) per step and rank, float [steps, ranks]; None where not known.
        since_step: Training step at which the episode began.
        detected_step: Training step at which it was noticed.
        usual: The rank's log excess before the episode.
    """
    excess = known_median(log_excess(own)[:, rank])
    more_work = 0.0 if samples is None else known_median(log_excess(samples)[:, rank])
    uneven = more_work > 0 and (excess - more_work < min(EFFECT, excess / 2) or more_work >= EXPLAINED * excess)
    evidence: dict[str, float | int | str] = {
        "own_seconds": known_median(own[:, rank]),
        "others_own_seconds": known_median(np.delete(own, rank, axis=1).ravel()),
        "usual_excess_ratio": math.expm1(usual),
        "steps": len(own),
    }
    if samples is not None:
        evidence["more_samples_ratio"] = math.expm1(more_work)
    return Verdict(
        kind="uneven_work" if uneven else "slow_rank",
        ranks=[rank],
        since_step=since_step,
        detected_step=detected_step,
        excess_ratio=math.expm1(excess),
        cause=UNEVEN_CAUSE if uneven else SLOW_CAUSE,
        evidence=evidence,
        cost_rank_seconds=cost_rank_seconds(own, [rank], [usual]),
        advice=UNEVEN_ADVICE if uneven else SLOW_ADVICE,
    )


# -------------------------------------------------------------------------------------------------
# Which meter goes with a verdict on a rank's own time.


class PriceMeter(Protocol):
    """The price of one open verdict while the run goes on."""

    @property
    def rank_seconds(self) -> float:
        """The price so far."""

    def add(self, own: ArrayLike) -> None:
        """Take in steps, float [steps, ranks] of own seconds."""


def meter_of(verdict: Verdict) -> PriceMeter:
    """Return a meter that goes on from the price of a verdict on one rank."""
    if is_of_pauses(verdict):
        return PauseMeter(verdict)
    usual = math.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))
    return Meter(verdict.ranks[0], math.log1p(verdict.excess_ratio), usual, verdict.cost_rank_seconds)

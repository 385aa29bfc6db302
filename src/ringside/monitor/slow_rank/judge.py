"""From an episode of one rank to a verdict: slow hardware or more work, in numbers, and its price."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from ringside.monitor.price import Meter, cost_rank_seconds
from ringside.monitor.slow_rank.pauses import PauseMeter, is_of_pauses, rejudge_pauses
from ringside.monitor.slow_rank.window_test import EFFECT
from ringside.monitor.stats import Floats, known_median, log_excess
from ringside.monitor.verdict import Evidence, Verdict

EXPLAINED = 0.7
"""Uneven work is the verdict when sample counts account for this much of the excess."""

SLOW_CAUSE = "its own work takes longer than the same work elsewhere"
SLOW_ADVICE = (
    "Compare this rank's clocks, temperature, CPU steal and neighbours with a healthy rank's; "
    "move the rank to another device or host if they do not explain it."
)
UNEVEN_CAUSE = "it was given more samples per step; per sample it is as fast as the others"
UNEVEN_ADVICE = "Balance the batches: equal samples (or tokens) per rank, or bucket sequences by length."
ROUTED_CAUSE = "more tokens are sent to its experts; per token it is as fast as the others"
ROUTED_ADVICE = "Balance the experts: a load-balancing loss or a capacity per expert, or other experts on this rank."


def judge_excess(
    rank: int,
    own: Floats,
    samples: Floats | None,
    routed: Floats | None = None,
    *,
    since_step: int,
    detected_step: int,
    usual: float = 0.0,
    excess: float | None = None,
) -> Verdict:
    """Return the verdict on one rank's episode.

    Args:
        rank: The culprit.
        own: Own times in seconds over the episode so far, float [steps, ranks]; NaN = missing.
        samples: Samples (or tokens) per step and rank, float [steps, ranks]; NaN or None where not known.
        routed: Bytes of the tokens that were sent to experts, likewise.
        since_step: Training step at which the episode began.
        detected_step: Training step at which it was noticed.
        usual: The rank's log excess before the episode.
        excess: Its log excess now, where that is known better than from whole own times.
    """
    if excess is None:
        excess = known_median(log_excess(own)[:, rank])
    more_samples, more_routed = (
        0.0 if work is None else known_median(log_excess(work)[:, rank]) for work in (samples, routed)
    )
    more_work = max(more_samples, more_routed)
    uneven = more_work > 0 and (excess - more_work < min(EFFECT, excess / 2) or more_work >= EXPLAINED * excess)
    evidence: Evidence = {
        "own_seconds": known_median(own[:, rank]),
        "others_own_seconds": known_median(np.delete(own, rank, axis=1).ravel()),
        "usual_excess_ratio": math.expm1(usual),
        "steps": len(own),
    }
    if samples is not None and np.isfinite(samples).any():
        evidence["more_samples_ratio"] = math.expm1(more_samples)
    if routed is not None and (routed > 0).any():
        evidence["more_routed_ratio"] = math.expm1(more_routed)
    cause, advice = SLOW_CAUSE, SLOW_ADVICE
    if uneven:
        by_samples = more_samples >= more_routed
        cause, advice = (UNEVEN_CAUSE, UNEVEN_ADVICE) if by_samples else (ROUTED_CAUSE, ROUTED_ADVICE)
    return Verdict(
        kind="uneven_work" if uneven else "slow_rank",
        ranks=[rank],
        since_step=since_step,
        detected_step=detected_step,
        excess_ratio=math.expm1(excess),
        cause=cause,
        evidence=evidence,
        cost_rank_seconds=cost_rank_seconds(own, [rank], [usual]),
        advice=advice,
    )


def rejudge(verdict: Verdict, own: Floats, samples: Floats | None, routed: Floats | None = None) -> Verdict:
    """Return a detector's verdict judged again on all steps of its episode.

    Args:
        verdict: What `Detector.update` found.
        own: Own times in seconds over the episode, float [steps, ranks].
        samples: Samples over the episode, [steps, ranks], or None.
        routed: Bytes sent to experts over it, likewise.
    """
    if is_of_pauses(verdict):
        return rejudge_pauses(verdict, own)
    again = judge_excess(
        verdict.ranks[0],
        own,
        samples,
        routed,
        since_step=verdict.since_step,
        detected_step=verdict.detected_step,
        usual=float(np.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))),
    )
    return msgspec.structs.replace(again, evidence={**verdict.evidence, **again.evidence})


PriceMeter = Meter | PauseMeter
"""The price of one open verdict while the run goes on."""


def meter_of(verdict: Verdict) -> PriceMeter:
    """Return a meter that goes on from the price of a verdict on one rank."""
    if is_of_pauses(verdict):
        return PauseMeter(verdict)
    usual = math.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))
    return Meter(verdict.ranks[0], math.log1p(verdict.excess_ratio), usual, verdict.cost_rank_seconds)

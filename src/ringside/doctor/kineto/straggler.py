"""Who held a traced job up: the persistent culprit, and not the rank that happens to be last in some step.

The on-line detector (`ringside.monitor.detect`) needs tens of steps, of which it learns the baseline; profilers record
few. `persistent_rank` finds who is slow throughout them, the detector who became slow within long ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import msgspec
import numpy as np

from ringside.monitor import Verdict, detect
from ringside.monitor.intervals import Floats
from ringside.monitor.slow_rank.detector import judge_excess
from ringside.monitor.slow_rank.window_test import EFFECT
from ringside.monitor.stats import log_excess, student
from ringside.text import duration, percent, size

# -------------------------------------------------------------------------------------------------
# Which rank is the slowest for good: four tests that chance alone passes in less than one trace in 500.
#
# Each looks where another is weak. Counting in how many steps a rank was the slowest needs no idea of the noise, but
# many steps; comparing all times (Mann and Whitney), or only the fastest steps, finds a rank behind pauses that hit
# everybody now and then; measuring the lead in units of the noise works from three steps on, where the noise is small.

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
    # slower in both halves, or it is an episode and not its nature
    if min(float(np.median(half)) for half in np.array_split(excess[:, rank], 2)) < EFFECT:
        return None
    allowed = CHANCE / ranks / TESTS
    logs = np.log(own_s)
    # Slowest in more steps than chance would give one rank of many alike?
    slowest = logs.argmax(axis=1) == rank
    clump = clumping(slowest.astype(np.float64))
    too_often = binomial_tail(int(slowest.sum() / clump), math.ceil(steps / clump), 1.0 / ranks)
    held = (
        too_often < allowed
        or (steps >= MANY and min(_against(logs, rank, _above), _against(logs, rank, _few_fast)) < allowed)
        or _leads(logs, rank, allowed)
    )
    return rank if held else None


def binomial_tail(times: int, steps: int, probability: float) -> float:
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
    steps, drawn = math.ceil(len(own) / clump), int(fast.sum() / clump)
    own_fast = int(fast[: len(own)].sum() / clump + 0.5)
    # hypergeometric: the tail up to as few as were seen
    ways = sum(math.comb(steps, few) * math.comb(steps, drawn - few) for few in range(min(own_fast, drawn) + 1))
    return ways / math.comb(2 * steps, drawn)


def _leads(logs: Floats, rank: int, allowed: float) -> bool:
    """Whether it leads each other rank, step by step, by far more than their distance varies."""
    steps, ranks = logs.shape
    leads = logs[:, [rank]] - np.delete(logs, rank, axis=1)
    if leads.mean(axis=0).min() < LEAST_LEAD or leads.min() < EFFECT:
        return False
    clump = max(clumping(column) for column in leads.T)
    needed = float(student(NormalDist().inv_cdf(1.0 - allowed), np.array(float((steps - 1) * (ranks - 1)))))
    noise = math.sqrt(float(leads.var(axis=0, ddof=1).mean()) / steps * clump + UNLIKE**2)
    return bool(leads.mean(axis=0).min() / noise >= needed)


EPISODE = 1 / 3
"""A rank that was slow only for a while is named if that was this share of the steps recorded."""
LEAST_STEPS = 3
SIMILAR = 0.1
"""Own times are similar while no rank's is more than this above the others' in the median step."""
SMALL_BYTES = 256 << 10
MANY_SMALL = 16
"""Small collectives per step that are too many ..."""
SMALL_SHARE = 0.5
"""... if they are at least this share of all, and the rank waits for communication in ..."""
SMALL_EXPOSED = 0.05
MANY_COLLECTIVES = 200
"""Collectives per step that are many whatever their size, where traces do not say it."""
BOUND = 0.7
"""A job is bound by communication if even the rank that waits least waits for this share of its step."""


@dataclass(frozen=True)
class RankPace:
    """How fast each rank worked.

    Args:
        ranks: The ranks.
        numbers: Numbers of the steps that all of them recorded.
        own_s: Own times, float64 [steps, ranks], seconds.
        step_s: Whole steps, float64 [steps, ranks], seconds.
        exposed_s: Waiting for communication, float64 [steps, ranks], seconds.
    """

    ranks: list[int]
    numbers: list[int]
    own_s: Floats
    step_s: Floats
    exposed_s: Floats

    @property
    def slowest(self) -> list[int]:
        """In how many steps each rank was the slowest."""
        return np.bincount(self.own_s.argmax(axis=1), minlength=len(self.ranks)).tolist() if len(self.own_s) else []

    @property
    def excess(self) -> Floats:
        """How much longer each rank works than the others, in the median step: float64 [ranks], 0.1 means 10%."""
        if not len(self.own_s) or len(self.ranks) < 2:
            return np.zeros(len(self.ranks))
        return np.expm1(np.nanmedian(log_excess(self.own_s), axis=0))

    @property
    def exposed_ratio(self) -> float:
        """The share of a step, in the median, for which the rank that waits least waits for communication."""
        if not self.numbers:
            return 0.0
        return float(np.median(self.exposed_s.min(axis=1) / np.maximum(self.step_s.min(axis=1), 1e-12)))


def judge_stragglers(pace: RankPace, lateness_s: Floats, waits_s: Floats) -> list[Verdict]:
    """Return a verdict per persistent culprit; none where it moves from step to step.

    Args:
        pace: How fast each rank worked.
        lateness_s: Mean lateness at collectives, float64 [ranks], seconds.
        waits_s: Mean wait at collectives, float64 [ranks], seconds.
    """
    if len(pace.ranks) < 2 or len(pace.numbers) < LEAST_STEPS:
        return []
    # The rank that is the slowest for good, or else each that the detector finds slow for a good part of the trace.
    steps = len(pace.numbers)
    rank = persistent_rank(pace.own_s)
    if rank is not None:
        found = [judge_excess(rank, pace.own_s, None, since_step=0, detected_step=steps - 1)]
    else:
        changed = [verdict for verdict in detect(pace.own_s) if verdict.excess_ratio > 0]
        lasted = [int(verdict.evidence.get("until_step", steps)) - verdict.since_step for verdict in changed]
        found = [verdict for verdict, length in zip(changed, lasted, strict=True) if length >= EPISODE * steps]
    # Columns and rows become ranks and step numbers, with what the collectives show beside them.
    named = []
    for verdict in found:
        column = verdict.ranks[0]
        others = [index for index in range(len(pace.ranks)) if index != column]
        evidence: dict[str, float | int | str] = {
            **verdict.evidence,
            "slowest_in_steps": pace.slowest[column],
            "lateness_seconds": _finite(lateness_s[column]),
            "others_lateness_seconds": _finite(np.median(lateness_s[others])),
            "wait_seconds": _finite(waits_s[column]),
            "others_wait_seconds": _finite(np.median(waits_s[others])),
        }
        last = len(pace.numbers) - 1
        if "until_step" in evidence:
            evidence["until_step"] = pace.numbers[min(int(evidence["until_step"]), last)]
        cause = (
            f"{verdict.cause}; it arrives last at collectives ({duration(float(lateness_s[column]))} late on average) "
            f"and waits least there, while the others wait {duration(float(np.median(waits_s[others])))} per collective"
        )
        named.append(
            msgspec.structs.replace(
                verdict,
                ranks=[pace.ranks[column]],
                since_step=pace.numbers[min(max(verdict.since_step, 0), last)],
                detected_step=pace.numbers[min(max(verdict.detected_step, 0), last)],
                evidence=evidence,
                cause=cause,
            )
        )
    return named


def bound_by_communication(pace: RankPace) -> list[Verdict]:
    """Return a verdict if even the rank that waits least waits for most of its step: that is no rank's fault."""
    if len(pace.ranks) < 2 or len(pace.numbers) < LEAST_STEPS:
        return []
    share = pace.exposed_ratio
    if share < BOUND:
        return []
    lost = float(pace.exposed_s.min(axis=1).sum()) * len(pace.ranks)
    return [
        Verdict(
            kind="communication_bound",
            ranks=[],
            since_step=pace.numbers[0],
            detected_step=pace.numbers[-1],
            excess_ratio=share / max(1.0 - share, 1e-9),
            cause=f"every rank waits for communication in at least {percent(share)} of its step",
            evidence={"exposed_ratio": share, "steps": len(pace.numbers)},
            cost_rank_seconds=lost,
            advice="Overlap communication with backward, send fewer or smaller gradients (accumulation, compression), "
            "or look for a slow link (`ringside probe`).",
        )
    ]


def too_many_collectives(
    numbers: Sequence[int], per_step: float, small_ratio: float | None, exposed_ratio: float
) -> list[Verdict]:
    """Return a verdict if a step launches many small collectives and waits for them, or hundreds of unknown size.

    Args:
        numbers: Numbers of the steps.
        per_step: Collectives per step.
        small_ratio: Share of them below `SMALL_BYTES`; None where their sizes are not in the traces.
        exposed_ratio: Share of the step in which the rank that waits least waits for communication.
    """
    if len(numbers) < LEAST_STEPS:
        return []
    evidence: dict[str, float | str] = {"collectives_per_step": per_step, "exposed_ratio": exposed_ratio}
    if small_ratio is None:
        if per_step < MANY_COLLECTIVES:
            return []
        cause = (
            f"each of {per_step:.0f} collectives per step costs a launch and a synchronisation of all ranks; "
            "their sizes are not in the traces"
        )
        advice = (
            "Record their sizes (record_shapes=True); where they are small, put gradients into larger "
            "buckets (bucket_cap_mb), or coalesce the calls."
        )
    else:
        small = per_step * small_ratio
        if small < MANY_SMALL or small_ratio < SMALL_SHARE or exposed_ratio < SMALL_EXPOSED:
            return []
        evidence["small_ratio"] = small_ratio
        least = size(SMALL_BYTES, binary=True)
        cause = f"{small:.0f} of {per_step:.0f} collectives per step carry less than {least} each"
        advice = "Put gradients into larger buckets (bucket_cap_mb), or coalesce the calls."
    return [
        Verdict(
            kind="small_collectives",
            ranks=[],
            since_step=numbers[0],
            detected_step=numbers[-1],
            excess_ratio=exposed_ratio,
            cause=cause,
            evidence=evidence,
            advice=advice,
        )
    ]


def judge_mismatches(conflicts: Sequence[tuple[str, int, dict[int, str]]]) -> list[Verdict]:
    """Return one verdict on the first collective at which ranks called different things; the minority is named."""
    if not conflicts:
        return []
    group, seq, calls = min(conflicts, key=lambda conflict: conflict[1])
    words = list(calls.values())
    majority = max(set(words), key=words.count)
    decided = words.count(majority) * 2 > len(words)
    odd = sorted(rank for rank, text in calls.items() if decided and text != majority)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(calls.items())[:8])
    return [
        Verdict(
            kind="mismatch",
            ranks=odd,
            since_step=0,
            detected_step=0,
            excess_ratio=0.0,
            cause=f"ranks called different collectives as number {seq} of group {group or 'unnamed'}: {listed}",
            evidence={"seq": seq, "group": group, "usual": majority},
            advice="Look for a branch that only some ranks take (a conditional layer, a shorter data set).",
        )
    ]


def _finite(value: float) -> float:
    return float(value) if math.isfinite(value) else 0.0

"""Why a rank is slow, as far as its records show: what held it up, which phase grew, whether it was running at all."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
import numpy as np

from ringside.monitor.causes.signs import (
    SIGN_EVIDENCE,
    SLEEP_ADVICE,
    ProbableCause,
    compare_rank,
    find_signs,
    had_no_cpu,
)
from ringside.monitor.run.table import StepTable
from ringside.monitor.stats import Floats, known_median
from ringside.monitor.verdict import Verdict
from ringside.text import duration

PHASES = ("data", "forward", "backward", "optimizer")
PHASE_WORDS = {
    "data": "fetching its input",
    "forward": "its forward pass",
    "backward": "its backward pass",
    "optimizer": "its optimizer update",
}
DOMINANT = 0.6
"""A phase that holds this share of the excess is named; for the input, the verdict changes its kind."""

CONTENDED = 0.1
"""A rank that had no CPU for this share of the time, as the healthy ones, was not running all the time."""

DESCHEDULED = "it was ready to run but had no CPU for part of the step: descheduled or throttled"
UNEXPLAINED = "it was running for less of the step than usual, and the kernel's counters do not show why"
RUNNING = "it was running all the time: more work to do, or a slower clock"
AS_MUCH_CPU = "it had a CPU as much as the others: more work to do, or a slower clock"
INPUT_ADVICE = (
    "Give this rank's data loader more workers or prefetching, or move its share of the data to storage as fast as "
    "the others'."
)
DESCHEDULED_ADVICE = (
    "Look for another process on this rank's cores, a CPU quota of its container (cpu.stat: nr_throttled) or steal "
    "time of its virtual machine; pin the rank or move it."
)


def explain_verdict(verdict: Verdict, episode: StepTable, before: StepTable | None = None) -> Verdict:
    """Return a `slow_rank` verdict with its cause: what held it up, the phase that grew, running slowly or not running.

    Args:
        verdict: A verdict on one rank.
        episode: The records of its episode.
        before: The records before it, where there are any.

    Returns:
        The verdict with more evidence and, if the input is what grew, of the kind `input_bound`; verdicts of other
        kinds come back as they are.
    """
    if verdict.kind != "slow_rank" or not len(episode):
        return verdict
    rank = verdict.ranks[0]
    # How much longer each phase took on this rank than on the median of the others, seconds per step.
    extra, measured = {}, set()
    for phase in PHASES:
        seconds = episode[f"{phase}_seconds"]
        if np.nansum(seconds) > 0:
            measured.add(phase)
        extra[phase] = known_median(seconds[:, rank]) - known_median(np.delete(seconds, rank, axis=1).ravel())
    total = sum(max(value, 0.0) for value in extra.values())
    grown = max(PHASES, key=lambda phase: extra[phase])
    evidence = {f"extra_{phase}_seconds": value for phase, value in extra.items() if phase in measured}
    longer = f"{duration(extra[grown])} per step"
    found = [] if total <= 0 else [f"most of the extra time is in {PHASE_WORDS[grown]} ({longer})"]
    comparison = compare_rank(rank, verdict.excess_ratio, episode, before)
    signs = find_signs(comparison)
    if total > 0 and grown == "data" and extra["data"] >= DOMINANT * total:
        loading = [sign for sign in signs if sign.advice != SLEEP_ADVICE]  # a rank that waits for its input sleeps
        return _with_signs(verdict, evidence, found, loading, kind="input_bound", advice=INPUT_ADVICE)
    if total > 0 and extra[grown] < DOMINANT * total:
        found = ["all of its phases take longer"]
    if signs:
        return _with_signs(verdict, evidence, found, signs)

    # Nothing is known to hold it up: whether it had a CPU with its share before, or else with the others'. A share of
    # the *step* is robust: a rank that spins while it waits and one that sleeps both look busier, never idler, once
    # they are the culprit and wait no more.
    share = _busy(episode)
    usual = known_median(_busy(before)[:, rank]) if before is not None and len(before) else 0.0
    usual = usual or known_median(np.delete(share, rank, axis=1).ravel())
    now = known_median(share[:, rank])
    if now <= 0 or usual <= 0:
        return _with(verdict, evidence, found)
    numbers = {**evidence, "cpu_share_ratio": now, "usual_cpu_share_ratio": usual}
    waited, lost = had_no_cpu(comparison), verdict.excess_ratio / (1.0 + verdict.excess_ratio)
    if now < usual * (1.0 - 0.5 * lost):
        why = DESCHEDULED if math.isnan(waited) else UNEXPLAINED
        return _with(verdict, numbers, [*found, why], advice=DESCHEDULED_ADVICE)
    return _with(verdict, numbers, [*found, AS_MUCH_CPU if waited >= CONTENDED else RUNNING])


def _with_signs(
    verdict: Verdict, evidence: dict[str, float], found: list[str], signs: list[ProbableCause], **changes: str
) -> Verdict:
    """Name the strongest sign first, with its advice; the numbers of all of them are evidence."""
    numbers: dict[str, float | int | str] = dict(evidence)
    for sign in signs:
        numbers |= sign.evidence
    strongest = [sign.words for sign in signs[:1]]
    advice = {"advice": signs[0].advice} if signs else {}
    return _with(verdict, numbers, [*strongest, *found], **{**changes, **advice})


def _with(verdict: Verdict, evidence: Mapping[str, float | int | str], found: list[str], **changes: str) -> Verdict:
    cause = "; ".join(found) or verdict.cause
    kept = {name: value for name, value in verdict.evidence.items() if name not in SIGN_EVIDENCE}
    return msgspec.structs.replace(verdict, cause=cause, evidence={**kept, **evidence}, **changes)


def _busy(table: StepTable) -> Floats:
    steps = table["step_seconds"]
    share: Floats = np.where(steps > 0, table["cpu_seconds"] / np.where(steps > 0, steps, 1.0), np.nan)
    return share

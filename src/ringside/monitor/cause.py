"""Why a rank is slow, as far as its records tell: which phase grew, and whether it was running at all."""

from __future__ import annotations

import msgspec
import numpy as np

from ringside.monitor.excess import Floats
from ringside.monitor.judge import middle
from ringside.monitor.table import Table
from ringside.monitor.verdict import Verdict

PHASES = ("data", "forward", "backward", "optimizer")
PHASE_WORDS = {
    "data": "fetching its input",
    "forward": "its forward pass",
    "backward": "its backward pass",
    "optimizer": "its optimizer update",
}
DOMINANT = 0.6
"""A phase that holds this share of the excess is named; for the input, the verdict changes its kind."""

INPUT_ADVICE = (
    "Give this rank's data loader more workers or prefetching, or move its share of the data to storage as fast as "
    "the others'."
)
DESCHEDULED_ADVICE = (
    "Look for another process on this rank's cores, a CPU quota of its container (cpu.stat: nr_throttled) or steal "
    "time of its virtual machine; pin the rank or move it."
)


def explain(verdict: Verdict, episode: Table, before: Table | None = None) -> Verdict:
    """Return a `slow_rank` verdict with its cause: the phase that grew, and running slowly or not running.

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
    extra = {phase: _extra(episode[f"{phase}_seconds"], rank) for phase in PHASES}
    total = sum(max(value, 0.0) for value in extra.values())
    grown = max(PHASES, key=lambda phase: extra[phase])
    evidence = {f"extra_{phase}_seconds": value for phase, value in extra.items() if episode_has(episode, phase)}
    found = [] if total <= 0 else [f"most of the extra time is in {PHASE_WORDS[grown]} ({_ms(extra[grown])} per step)"]
    if total > 0 and grown == "data" and extra["data"] >= DOMINANT * total:
        return _with(verdict, evidence, found, kind="input_bound", advice=INPUT_ADVICE)
    if total > 0 and extra[grown] < DOMINANT * total:
        found = ["all of its phases take longer"]
    return _with_cpu(verdict, evidence, found, rank, episode, before)


def _with_cpu(
    verdict: Verdict, evidence: dict[str, float], found: list[str], rank: int, episode: Table, before: Table | None
) -> Verdict:
    """Compare the share of the step in which the rank had a CPU with its share before, or else with the others'.

    A share of the *step* is robust: a rank that spins while it waits and one that sleeps both look busier, never
    idler, once they are the culprit and wait no more.
    """
    share = _busy(episode)
    usual = middle(_busy(before)[:, rank]) if before is not None and len(before) else 0.0
    usual = usual or middle(np.delete(share, rank, axis=1).ravel())
    now = middle(share[:, rank])
    if now <= 0 or usual <= 0:
        return _with(verdict, evidence, found)
    evidence = {**evidence, "cpu_share_ratio": now, "usual_cpu_share_ratio": usual}
    lost = verdict.excess_ratio / (1.0 + verdict.excess_ratio)
    if now < usual * (1.0 - 0.5 * lost):
        found = [*found, "it was ready to run but had no CPU for part of the step: descheduled or throttled"]
        return _with(verdict, evidence, found, advice=DESCHEDULED_ADVICE)
    return _with(verdict, evidence, [*found, "it was running all the time: more work to do, or a slower clock"])


def _with(verdict: Verdict, evidence: dict[str, float], found: list[str], **changes: str) -> Verdict:
    cause = "; ".join(found) or verdict.cause
    return msgspec.structs.replace(verdict, cause=cause, evidence={**verdict.evidence, **evidence}, **changes)


def episode_has(table: Table, phase: str) -> bool:
    """Return whether a phase was measured at all in these records."""
    return bool(np.nansum(table[f"{phase}_seconds"]) > 0)


def _extra(seconds: Floats, rank: int) -> float:
    """How much longer a phase took on `rank` than on the median of the others, in seconds per step."""
    return middle(seconds[:, rank]) - middle(np.delete(seconds, rank, axis=1).ravel())


def _busy(table: Table) -> Floats:
    steps = table["step_seconds"]
    share: Floats = np.where(steps > 0, table["cpu_seconds"] / np.where(steps > 0, steps, 1.0), np.nan)
    return share


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:+.3g} ms"

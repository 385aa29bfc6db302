"""The four questions of a profile, answered with numbers from the traces of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringside.doctor.findings import Number, Question
from ringside.doctor.kineto_intervals import Floats
from ringside.doctor.kineto_judge import LEAST_STEPS, MANY_SMALL, SIMILAR, SMALL_BYTES, SMALL_SHARE, Pace
from ringside.doctor.kineto_match import Matched
from ringside.doctor.kineto_steps import RankSteps
from ringside.doctor.kineto_trace import RankTrace
from ringside.monitor.questions import COUNTS, DOMINATES, NETWORK
from ringside.monitor.verdict import Verdict, headline, percent
from ringside.text import ms
from ringside.text import short_size as size


@dataclass(frozen=True)
class Evidence:
    """What the answers rest on: the traces of a job, what each rank did, and the matched collectives."""

    traces: Sequence[RankTrace]
    steps: Sequence[RankSteps]
    pace: Pace
    matched: Matched


def answers(evidence: Evidence, slow: Sequence[Verdict]) -> dict[str, Question]:
    """Return the answers by their names in `findings.QUESTIONS`.

    Args:
        evidence: What they rest on.
        slow: Verdicts on persistently slow ranks.
    """
    return {
        "communication_dominates": _dominates(evidence),
        "similar_step_times": _similar(evidence, slow),
        "network_between_hosts": _network(evidence),
        "small_collectives": _small(evidence),
    }


def _dominates(evidence: Evidence) -> Question:
    tail = _mean([rank.tail_s for rank in evidence.steps])
    after = _mean([rank.after_backward_s for rank in evidence.steps])
    step, exposed = (_mean([getattr(rank, name) for rank in evidence.steps]) for name in ("step_s", "exposed_s"))
    numbers: dict[str, Number] = {
        "step_seconds": step,
        "exposed_seconds": exposed,
        "exposed_ratio": exposed / max(step, 1e-12),
    }
    if not np.isfinite(tail):
        return Question(answer=None, numbers=numbers, words="No gradient and no all-reduce after it can be seen.")
    share, of_step = tail / max(after, 1e-12), tail / max(step, 1e-12)
    numbers |= {
        "last_gradient_to_last_collective_seconds": tail,
        "after_backward_seconds": after,
        "communication_after_backward_ratio": share,
        "of_step_ratio": of_step,
    }
    words = f"From the last gradient to the last collective's end {ms(tail)} pass, {percent(of_step)} of a step"
    return Question(answer=share > DOMINATES and of_step > COUNTS, numbers=numbers, words=f"{words}.")


def _similar(evidence: Evidence, slow: Sequence[Verdict]) -> Question:
    pace = evidence.pace
    if len(pace.ranks) < 2 or not pace.numbers:
        return Question(answer=None, words="One rank's trace cannot tell how fast the others were.")
    steps, own = pace.step_s.mean(axis=0), np.median(pace.own_s, axis=0)
    slowest = int(np.argmax(pace.excess))
    worst = float(pace.excess[slowest])
    numbers: dict[str, Number] = {
        "steps": len(pace.numbers),
        "step_seconds_least": float(steps.min()),
        "step_seconds_most": float(steps.max()),
        "own_seconds_least": float(own.min()),
        "own_seconds_most": float(own.max()),
        "worst_rank": pace.ranks[slowest],
        "worst_excess_ratio": worst,
    }
    words = f"Own times (without waiting) lie between {ms(float(own.min()))} and {ms(float(own.max()))}"
    if len(pace.numbers) < LEAST_STEPS:
        return Question(answer=None, numbers=numbers, words=f"{words}; {len(pace.numbers)} step is too few to tell.")
    if slow:
        words = f"{words}; {', and '.join(map(headline, slow))}"
    elif worst > SIMILAR:
        words = f"{words}; which rank needs most (now rank {pace.ranks[slowest]}) changes from step to step"
    return Question(answer=not slow, numbers=numbers, words=f"{words}.")


def _network(evidence: Evidence) -> Question:
    pace, matched = evidence.pace, evidence.matched
    hosts = {trace.host for trace in evidence.traces if trace.host}
    if not len(matched.parts) or not pace.numbers:
        return Question(answer=None, words="No collective of several ranks can be matched, so no transfer is known.")
    transfer = np.nanmin(matched.durations, axis=1)
    nbytes = np.array([part.nbytes for part in matched.parts], dtype=np.float64)
    nranks = (~np.isnan(matched.starts)).sum(axis=1)
    exposed = float(pace.exposed_s.min(axis=1).mean() / max(pace.step_s.mean(), 1e-12))
    reduces = np.array([part.kind == "all_reduce" for part in matched.parts])
    busbw = nbytes * np.where(reduces, 2 * (nranks - 1) / nranks, 1.0) / np.maximum(transfer, 1e-9)
    large = busbw[nbytes >= nbytes.max() / 2]
    numbers: dict[str, Number] = {
        "transfer_seconds_per_step": float(transfer.sum() / len(pace.numbers)),
        "exposed_transfer_ratio": exposed,
        "busbw_bytes_per_second": float(np.median(large)),
        "hosts": len(hosts),
    }
    speed = f"{size(float(np.median(large)))}/s"
    words = f"Transfers nobody was late for are exposed for {percent(exposed)} of a step, at {speed}"
    if len(hosts) == 1 and all(trace.host for trace in evidence.traces):
        return Question(answer=False, numbers=numbers, words=f"All ranks are on one host. {words}.")
    if not hosts:
        answer = None if exposed >= NETWORK else False
        return Question(answer=answer, numbers=numbers, words=f"The traces do not name hosts. {words}.")
    return Question(answer=exposed >= NETWORK, numbers=numbers, words=f"{words}, between {len(hosts)} hosts.")


def _small(evidence: Evidence) -> Question:
    parts = [one for trace in evidence.traces for one in trace.collectives]
    if not parts:
        return Question(answer=None, words="The traces show no collective.")
    sizes = np.array([one.nbytes for one in parts], dtype=np.float64)
    known = sizes[sizes > 0]
    per_step = _mean([rank.collectives.astype(np.float64) for rank in evidence.steps])
    numbers: dict[str, Number] = {"collectives_per_step": per_step}
    if not len(known):
        return Question(answer=None, numbers=numbers, words="The traces do not say how large collectives are.")
    small = float((known < SMALL_BYTES).mean())
    numbers |= {
        "median_bytes": float(np.median(known)),
        "small_ratio": small,
        "small_per_step": per_step * small,
        "small_seconds_ratio": _small_time(parts),
    }
    words = f"{per_step:.1f} collectives per step, {percent(small)} of them below {SMALL_BYTES >> 10} KB"
    many = per_step * small >= MANY_SMALL and small >= SMALL_SHARE
    return Question(
        answer=many, numbers=numbers, words=f"{words}; half are smaller than {size(float(np.median(known)))}."
    )


def _small_time(parts: Sequence[object]) -> float:
    seconds = np.array([one.duration_s for one in parts])  # type: ignore[attr-defined]
    small = np.array([0 < one.nbytes < SMALL_BYTES for one in parts])  # type: ignore[attr-defined]
    return float(seconds[small].sum() / max(seconds.sum(), 1e-12))


def _mean(columns: Sequence[Floats]) -> float:
    """The mean over ranks and steps of what is known; NaN where nothing is."""
    values = np.concatenate(columns) if len(columns) else np.empty(0)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")

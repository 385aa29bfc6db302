"""The four questions of a profile, answered with numbers from the traces of a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringside.doctor.findings import Lane, Number, Question, Sheet, TimeSpan
from ringside.doctor.kineto.match import Matched
from ringside.doctor.kineto.steps import RankSteps, activity_by_kind
from ringside.doctor.kineto.straggler import LEAST_STEPS, MANY_SMALL, SIMILAR, SMALL_BYTES, SMALL_SHARE, RankPace
from ringside.doctor.kineto.trace import RankTrace, TracedCollective, TracedJob
from ringside.monitor.intervals import Floats
from ringside.monitor.job.questions import COUNTS, DOMINATES, NETWORK
from ringside.monitor.verdict import Verdict, headline
from ringside.text import counted, duration, percent, rate, size


@dataclass(frozen=True)
class Evidence:
    """What the answers rest on: the traces of a job, what each rank did, and the matched collectives."""

    traces: Sequence[RankTrace]
    steps: Sequence[RankSteps]
    pace: RankPace
    matched: Matched


def answer_questions(evidence: Evidence, slow: Sequence[Verdict]) -> dict[str, Question]:
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
    words = f"From the last gradient to the last collective's end {duration(tail)} pass, {percent(of_step)} of a step"
    return Question(answer=share > DOMINATES and of_step > COUNTS, numbers=numbers, words=f"{words}.")


def _similar(evidence: Evidence, slow: Sequence[Verdict]) -> Question:
    pace = evidence.pace
    if len(pace.ranks) < 2 or not pace.numbers:
        return Question(answer=None, words="One rank's trace does not show how fast the others were.")
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
    words = f"Own times (without waiting) lie between {duration(float(own.min()))} and {duration(float(own.max()))}"
    if len(pace.numbers) < LEAST_STEPS:
        words = f"{words}; {counted(len(pace.numbers), 'step')} recorded: too few to judge."
        return Question(answer=None, numbers=numbers, words=words)
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
    # busbw as nccl-tests define it: an all-reduce moves 2(n − 1)/n of its bytes over each link
    reduces = np.array([part.kind == "all_reduce" for part in matched.parts])
    busbw = nbytes * np.where(reduces, 2 * (nranks - 1) / nranks, 1.0) / np.maximum(transfer, 1e-9)
    large = busbw[nbytes >= nbytes.max() / 2]
    numbers: dict[str, Number] = {
        "transfer_seconds_per_step": float(transfer.sum() / len(pace.numbers)),
        "exposed_transfer_ratio": exposed,
        "busbw_bytes_per_second": float(np.median(large)),
        "hosts": len(hosts),
    }
    speed = f"{rate(float(np.median(large)))}"
    words = f"Exposed communication that waits for no rank: {percent(exposed)} of a step, at {speed}"
    if len(hosts) == 1 and all(trace.host for trace in evidence.traces):
        return Question(answer=False, numbers=numbers, words=f"All ranks are on one host. {words}.")
    if not hosts:
        answer = None if exposed >= NETWORK else False
        return Question(answer=answer, numbers=numbers, words=f"The traces do not name hosts. {words}.")
    return Question(answer=exposed >= NETWORK, numbers=numbers, words=f"{words}, between {len(hosts)} hosts.")


def _small(evidence: Evidence) -> Question:
    parts = [collective for trace in evidence.traces for collective in trace.collectives]
    if not parts:
        return Question(answer=None, words="The traces show no collective.")
    sizes = np.array([part.nbytes for part in parts], dtype=np.float64)
    known = sizes[sizes > 0]
    per_step = _mean([rank.collectives.astype(np.float64) for rank in evidence.steps])
    numbers: dict[str, Number] = {"collectives_per_step": per_step}
    if not len(known):
        words = f"{per_step:.1f} collectives per step; their sizes are not in the traces."
        return Question(answer=None, numbers=numbers, words=words)
    small = float((known < SMALL_BYTES).mean())
    # Time spent in small ones, of all.
    seconds = np.array([part.duration_s for part in parts])
    is_small = np.array([0 < part.nbytes < SMALL_BYTES for part in parts])
    numbers |= {
        "median_bytes": float(np.median(known)),
        "small_ratio": small,
        "small_per_step": per_step * small,
        "small_seconds_ratio": float(seconds[is_small].sum() / max(seconds.sum(), 1e-12)),
    }
    share = percent(small) if small > 0 else "none"
    words = f"{per_step:.1f} collectives per step, {share} of them below {size(SMALL_BYTES, binary=True)}"
    words += f"; half are smaller than {size(float(np.median(known)))}."
    many = per_step * small >= MANY_SMALL and small >= SMALL_SHARE
    return Question(answer=many, numbers=numbers, words=words)


def _mean(columns: Sequence[Floats]) -> float:
    """The mean over ranks and steps of what is known; NaN where nothing is."""
    values = np.concatenate(columns) if len(columns) else np.empty(0)
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")


# -------------------------------------------------------------------------------------------------
# What is shown of traced ranks: a table of steps, a table of collectives, lanes over time, further figures.

SHOWN_STEPS = 3
SHOWN_LANES = 64
SHOWN_SPANS = 400
"""Pieces of one kind per lane; shorter ones are left out first."""


def job_tables(evidence: Evidence, prefix: str, culprits: Sequence[int]) -> list[Sheet]:
    """Return the tables of a job: what ranks did per step, and its collectives."""
    rows_of_culprits = [index for index, rank in enumerate(evidence.pace.ranks) if rank in set(culprits)]
    parts = [collective for trace in evidence.traces for collective in trace.collectives]
    by_kind: dict[str, list[TracedCollective]] = defaultdict(list)
    for part in parts:
        by_kind[part.kind].append(part)
    kinds: list[list[Number | None]] = []
    for kind, alike in sorted(by_kind.items(), key=lambda item: -sum(part.nbytes for part in item[1])):
        nbytes = float(sum(part.nbytes for part in alike))
        kinds.append([kind, len(alike), nbytes, nbytes / len(alike), float(np.mean([p.duration_s for p in alike]))])
    # per rank, the mean over steps or over collectives of what is known
    matched = evidence.matched
    late, waits = matched.mean_per_rank(matched.lateness), matched.mean_per_rank(matched.waits)
    rows: list[list[Number | None]] = []
    for index, rank in enumerate(evidence.steps):
        columns = (rank.step_s, rank.work_s, rank.hidden_s, rank.exposed_s, rank.tail_s, rank.idle_s, rank.own_s)
        rows.append(
            [
                rank.rank,
                len(rank.numbers),
                *(_mean_or_none(column) for column in columns),
                _mean_or_none(waits[index : index + 1]),
                _mean_or_none(late[index : index + 1]),
                float(matched.clocks[index]) if len(matched.parts) else None,
                _mean_or_none(rank.collectives.astype(np.float64)),
                _mean_or_none(rank.nbytes),
            ]
        )
    return [
        Sheet(
            title=f"{prefix}Ranks, mean per step",
            columns=[
                "rank", "steps", "step_s", "compute_s", "hidden_s", "exposed_s", "last_gradient_to_last_collective_s",
                "idle_s", "own_s", "wait_s", "lateness_s", "clock_offset_s", "collectives", "bytes",
            ],
            rows=rows,
            culprits=rows_of_culprits,
            note="Wait: own duration of a collective minus the shortest of all ranks. Lateness: arrival after the "
            "first rank's, clocks corrected by collective ends. Both per collective.",
        ),
        Sheet(title=f"{prefix}Collectives", columns=["kind", "number", "bytes", "mean_bytes", "mean_s"], rows=kinds),
    ]  # fmt: skip


def _mean_or_none(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def job_facts(evidence: Evidence) -> dict[str, Any]:
    """Return further figures of a job: world, steps, who was slowest how often, clocks."""
    pace, matched = evidence.pace, evidence.matched
    names = [str(rank) for rank in pace.ranks]
    return {
        "ranks": pace.ranks,
        "world_size": max((trace.world_size for trace in evidence.traces), default=0),
        "backends": sorted({trace.backend for trace in evidence.traces if trace.backend}),
        "hosts": sorted({trace.host for trace in evidence.traces if trace.host}),
        "steps_in_common": pace.numbers,
        "slowest_in_steps": dict(zip(names, pace.slowest, strict=False)),
        "excess_ratio": dict(zip(names, pace.excess.tolist(), strict=True)),
        "matched_collectives": len(matched.parts),
        "unmatched_collectives": matched.unmatched,
        "clock_offset_seconds": dict(zip(names, matched.clocks.tolist(), strict=True)),
        "collective_end_spread_seconds": matched.end_spread_s(),
    }


def job_lanes(job: TracedJob, title: str) -> list[Lane]:
    """Return what the ranks did in the last steps that fit on a page, on one time axis."""
    windows = []
    for trace in job.traces:
        last = trace.steps[-SHOWN_STEPS:]
        windows.append((last[0].start_s, last[-1].end_s) if last else trace.span)
    origin = max((begin for begin, _ in windows), default=0.0)
    end = min((end for _, end in windows), default=0.0)
    if end <= origin:
        return []
    found = []
    for trace in job.traces[:SHOWN_LANES]:
        spans = []
        for kind, pieces in activity_by_kind(trace, origin, end).items():
            # the longest pieces, in the order of time
            longest = pieces[np.sort(np.argsort(pieces[:, 0] - pieces[:, 1], kind="stable")[:SHOWN_SPANS])]
            spans += [TimeSpan(start_s=float(a - origin), end_s=float(b - origin), kind=kind) for a, b in longest]
        found.append(Lane(title=title, rank=trace.rank, spans=sorted(spans, key=lambda span: span.start_s)))
    return found

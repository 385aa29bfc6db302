"""What is shown of traced ranks: a table of steps, a table of collectives, lanes over time, further figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringside.doctor.findings import Lane, Number, Sheet, Span
from ringside.doctor.kineto_jobs import Job
from ringside.doctor.kineto_questions import Evidence
from ringside.doctor.kineto_steps import sizes, waiting
from ringside.doctor.kineto_trace import RankTrace

SHOWN_STEPS = 3
SHOWN_LANES = 64
SHOWN_SPANS = 400
"""Pieces of one kind per lane; shorter ones are left out first."""


def sheets(evidence: Evidence, prefix: str, blamed: Sequence[int]) -> list[Sheet]:
    """Return the tables of a job: what ranks did per step, and its collectives."""
    culprits = [index for index, rank in enumerate(evidence.pace.ranks) if rank in set(blamed)]
    return [
        Sheet(
            title=f"{prefix}Ranks, mean per step",
            columns=[
                "rank", "steps", "step_s", "compute_s", "hidden_s", "exposed_s", "last_gradient_to_last_collective_s",
                "idle_s", "own_s", "wait_s", "lateness_s", "clock_offset_s", "collectives", "bytes",
            ],
            rows=_rank_rows(evidence),
            culprits=culprits,
            note="Wait: own duration of a collective minus the shortest of all ranks. Lateness: arrival after the "
            "first rank's, clocks corrected by collective ends. Both per collective.",
        ),
        Sheet(
            title=f"{prefix}Collectives",
            columns=["kind", "number", "bytes", "mean_bytes", "mean_s"],
            rows=_kind_rows(evidence.traces),
        ),
    ]  # fmt: skip


def _rank_rows(evidence: Evidence) -> list[list[Number | None]]:
    matched = evidence.matched
    late, waits, clocks = _means(matched.lateness), _means(matched.waits), matched.clocks
    rows: list[list[Number | None]] = []
    for index, rank in enumerate(evidence.steps):
        columns = (rank.step_s, rank.work_s, rank.hidden_s, rank.exposed_s, rank.tail_s, rank.idle_s, rank.own_s)
        rows.append(
            [
                rank.rank,
                len(rank.numbers),
                *(_mean(column) for column in columns),
                late_or_none(waits, index),
                late_or_none(late, index),
                float(clocks[index]) if len(matched.parts) else None,
                _mean(rank.collectives.astype(np.float64)),
                _mean(rank.nbytes),
            ]
        )
    return rows


def late_or_none(values: Sequence[float], index: int) -> float | None:
    """Return a rank's value, None where there is none."""
    return float(values[index]) if index < len(values) and np.isfinite(values[index]) else None


def _means(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    if not len(values):
        return []
    means: list[float] = np.ma.filled(np.ma.masked_invalid(values).mean(axis=0), np.nan).tolist()
    return means


def _mean(values: np.ndarray[Any, np.dtype[np.float64]]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _kind_rows(traces: Sequence[RankTrace]) -> list[list[Number | None]]:
    parts = [one for trace in traces for one in trace.collectives]
    rows: list[list[Number | None]] = []
    for kind, (count, nbytes) in sizes(parts).items():
        seconds = [one.duration_s for one in parts if one.kind == kind]
        rows.append([kind, count, nbytes, nbytes / count, float(np.mean(seconds))])
    return rows


def facts(evidence: Evidence) -> dict[str, Any]:
    """Return further figures of a job: world, steps, who was slowest how often, clocks."""
    pace, matched = evidence.pace, evidence.matched
    return {
        "ranks": pace.ranks,
        "world_size": max((trace.world_size for trace in evidence.traces), default=0),
        "backends": sorted({trace.backend for trace in evidence.traces if trace.backend}),
        "hosts": sorted({trace.host for trace in evidence.traces if trace.host}),
        "steps_in_common": pace.numbers,
        "slowest_in_steps": dict(zip(map(str, pace.ranks), pace.slowest, strict=False)),
        "excess_ratio": {str(rank): float(value) for rank, value in zip(pace.ranks, pace.excess, strict=True)},
        "matched_collectives": len(matched.parts),
        "unmatched_collectives": matched.unmatched,
        "clock_offset_seconds": {
            str(rank): float(value) for rank, value in zip(pace.ranks, matched.clocks, strict=True)
        },
        "collective_end_spread_seconds": matched.end_spread_s(),
    }


def lanes(job: Job, title: str) -> list[Lane]:
    """Return what the ranks did in the last steps that fit on a page, on one time axis."""
    windows = [_window(trace) for trace in job.traces]
    origin = max((begin for begin, _ in windows), default=0.0)
    end = min((end for _, end in windows), default=0.0)
    if end <= origin:
        return []
    return [Lane(title=title, rank=trace.rank, spans=_spans(trace, origin, end)) for trace in job.traces[:SHOWN_LANES]]


def _window(trace: RankTrace) -> tuple[float, float]:
    shown = trace.steps[-SHOWN_STEPS:]
    return (shown[0].start_s, shown[-1].end_s) if shown else trace.span


def _spans(trace: RankTrace, origin: float, end: float) -> list[Span]:
    spans = []
    for kind, pieces in waiting(trace, origin, end).items():
        longest = pieces[np.sort(np.argsort(pieces[:, 0] - pieces[:, 1], kind="stable")[:SHOWN_SPANS])]
        spans += [Span(start_s=float(a - origin), end_s=float(b - origin), kind=kind) for a, b in longest]
    return sorted(spans, key=lambda span: span.start_s)

"""What one rank did in each step: work, communication hidden behind it and exposed, idle, and the tail of backward."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from ringside.doctor.kineto.collector import GRADIENT
from ringside.doctor.kineto.trace import RankTrace
from ringside.monitor.intervals import Floats, clip, intersect, subtract, union, within


@dataclass(frozen=True)
class RankSteps:
    """One rank, step by step; all arrays are [steps], durations in seconds.

    Args:
        rank: The rank.
        numbers: Step numbers as the profiler counts them, int64.
        windows: Start and end, float64 [steps, 2].
        step_s: Length.
        work_s: Something was computed.
        hidden_s: Some collective ran while something was computed.
        exposed_s: ... while the rank waited for it.
        idle_s: Neither.
        tail_s: Last gradient ready until last collective done.
        after_backward_s: Last gradient ready until the end of the step.
        collectives: Number of collectives that began in it, int64.
        nbytes: Bytes this rank put in, float64.
    """

    rank: int
    numbers: np.ndarray[tuple[int], np.dtype[np.int64]]
    windows: Floats
    step_s: Floats
    work_s: Floats
    hidden_s: Floats
    exposed_s: Floats
    idle_s: Floats
    tail_s: Floats
    after_backward_s: Floats
    collectives: np.ndarray[tuple[int], np.dtype[np.int64]]
    nbytes: Floats

    @property
    def own_s(self) -> Floats:
        """The rank's own time: the step without the communication it waited for, float64 [steps], seconds."""
        return np.maximum(self.step_s - self.exposed_s, 0.0)


@dataclass(frozen=True)
class Activity:
    """Unions of intervals, float64 [n, 2], seconds: when a rank worked, communicated, and waited for it."""

    work: Floats
    communication: Floats
    exposed: Floats


def rank_activity(trace: RankTrace) -> Activity:
    """Return when a rank worked, communicated and waited.

    On a device, communication is exposed while no other kernel runs. Threads leave no trace of plain Python, so there
    a rank waits only in a pause that a collective's end ended, and not between its first and its last gradient:
    DistributedDataParallel never waits there.
    """
    communication = union(np.array([[each.start_s, each.end_s] for each in trace.collectives]).reshape(-1, 2))
    if trace.device:
        return Activity(trace.work, communication, subtract(communication, trace.work))
    # Threads leave no trace of plain Python: from its first piece to the last gradient all of backward is
    # busy, per step, unless it waits for other ranks itself (then it ran more than reductions and broadcasts).
    backwards: list[list[float]] = []
    starts = [each.start_s for each in trace.collectives]
    for step in trace.steps:
        begun = trace.backward[np.searchsorted(trace.backward, step.start_s) :][:1]
        ready = _last_before(trace.gradients, step.end_s)
        if not len(begun) or ready is None or not step.start_s <= begun[0] < ready:
            continue
        inside = trace.collectives[bisect_right(starts, begun[0]) : bisect_left(starts, ready)]
        if all(each.kind in ("all_reduce", "broadcast") for each in inside):
            backwards.append([float(begun[0]), ready])
    busy = union(np.concatenate([trace.work, np.array(backwards).reshape(-1, 2)]))
    # Pauses up to the last end of a collective inside each; those without one are no waiting.
    pauses = subtract(communication, busy)
    if not len(pauses):
        return Activity(trace.work, communication, np.empty((0, 2)))
    ends = np.sort([collective.end_s for collective in trace.collectives])
    last = np.searchsorted(ends, pauses[:, 1], side="right") - 1
    until = np.where(last >= 0, ends[np.maximum(last, 0)], -np.inf)
    held = until > pauses[:, 0]
    return Activity(trace.work, communication, np.stack([pauses[held, 0], until[held]], axis=1))


def steps_of(trace: RankTrace) -> RankSteps:
    """Return what a rank did, step by step; a trace without steps counts as one step, number -1."""
    seen = rank_activity(trace)
    windows = np.array([[step.start_s, step.end_s] for step in trace.steps] or [list(trace.span)], dtype=np.float64)
    numbers = np.array([step.number for step in trace.steps] or [-1], dtype=np.int64)
    length = windows[:, 1] - windows[:, 0]
    work, communication, exposed = (within(each, windows) for each in (seen.work, seen.communication, seen.exposed))
    hidden = np.maximum(communication - exposed, 0.0)
    # Where work and communication overlap the time counts once; the rest of the step is idle.
    busy = within(union(np.concatenate([seen.work, seen.communication])), windows)
    starts = np.array([each.start_s for each in trace.collectives])
    # A collective belongs to the step in which it began.
    home = np.searchsorted(windows[:, 0], starts, side="right") - 1
    weights = np.array([each.nbytes for each in trace.collectives], dtype=np.float64)
    nbytes: Floats = np.bincount(home[home >= 0], weights=weights[home >= 0], minlength=len(windows)).astype(float)
    gradient = [each for each in trace.collectives if each.kind in GRADIENT]
    begun = [each.start_s for each in gradient]
    # Per step, seconds from the last gradient to the last collective's end, and to the step's end.
    tails = np.full((len(windows), 2), np.nan)
    for row, (begin, end) in enumerate(windows.tolist()):
        inside = gradient[bisect_left(begun, begin) : bisect_left(begun, end)]
        if not inside:
            continue
        done = min(max(collective.end_s for collective in inside), end)
        if trace.device:
            # kernels do not name gradients: what the collective needed is the last work that began before its end
            place = int(np.searchsorted(seen.work[:, 0], done)) - 1
            ready = float(min(seen.work[place, 1], done)) if place >= 0 and seen.work[place, 1] > begin else None
        else:
            ready = _last_before(trace.gradients, end)
        if ready is not None and ready >= begin:
            tails[row] = max(done - ready, 0.0), max(end - ready, 0.0)
    return RankSteps(
        rank=trace.rank,
        numbers=numbers,
        windows=windows,
        step_s=length,
        work_s=work,
        hidden_s=hidden,
        exposed_s=exposed,
        idle_s=np.maximum(length - busy, 0.0),
        tail_s=tails[:, 0],
        after_backward_s=tails[:, 1],
        collectives=np.bincount(home[home >= 0], minlength=len(windows)).astype(np.int64),
        nbytes=nbytes,
    )


def _last_before(times: Floats, when: float) -> float | None:
    place = int(np.searchsorted(times, when, side="right")) - 1
    return float(times[place]) if place >= 0 else None


def activity_by_kind(trace: RankTrace, start_s: float, end_s: float) -> dict[str, Floats]:
    """Return what to draw between two times: unions by kind (`compute`, `wait`, `hidden`), float64 [n, 2], seconds."""
    seen = rank_activity(trace)
    hidden = intersect(seen.communication, seen.work) if trace.device else subtract(seen.communication, seen.exposed)
    parts = {"compute": seen.work, "hidden": hidden, "wait": seen.exposed}
    return {kind: clip(part, start_s, end_s) for kind, part in parts.items()}

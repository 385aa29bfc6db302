"""What can be wrong with one round: transfers that cannot be, writes without an order, ranks that wait for ever."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ringside.schedule.audit import Problem
from ringside.schedule.deadlock import Wait, cycles
from ringside.schedule.schedule import Round, Schedule
from ringside.schedule.traffic import well_formed
from ringside.text import named_vertices as named


def malformed(schedule: Schedule, step: Round, k: int) -> Iterator[Problem]:
    """Name the transfers of round k that cannot be."""
    keep = well_formed(schedule, step)
    if keep.all():
        return
    for src, dst, chunk, _ in step.where(~keep):
        outside = [vertex for vertex in (src, dst) if not 0 <= vertex < schedule.vertices]
        if outside:
            known = named([schedule.ranks - 1], schedule.ranks).removeprefix("rank ")
            why = f"there is no rank {outside[0]}, only ranks 0 to {known}"
            if schedule.switches:
                why += " and " + named(range(schedule.ranks, schedule.vertices), schedule.ranks)
        elif src == dst:
            why = f"a {'rank' if src < schedule.ranks else 'switch'} cannot send to itself"
        else:
            why = f"there is no chunk {chunk}, only chunks 0 to {schedule.chunks - 1}"
        sender, receiver = (_vertex(schedule, vertex) for vertex in (src, dst))
        message = f"in round {k} {sender} sends chunk {chunk} to {receiver}, but {why}"
        yield Problem("malformed", message, rank=(outside or [src])[0], chunk=chunk, round=k)


def unordered_writes(schedule: Schedule, step: Round, k: int) -> Iterator[Problem]:
    """Name the chunks that several messages of round k write, one of them overwriting."""
    if step.reduce.all():
        return
    target = step.dst.astype(np.int64) * schedule.chunks + step.chunk
    unique, writes = np.unique(target, return_counts=True)
    if len(unique) == len(target):
        return
    for flat in np.intersect1d(unique[writes > 1], target[~step.reduce]).tolist():
        vertex, chunk = divmod(flat, schedule.chunks)
        sources = named(step.src[target == flat].tolist(), schedule.ranks)
        message = (
            f"in round {k} {sources} write into chunk {chunk} of {_vertex(schedule, vertex)} at once, at least one of "
            "them overwriting it: the result depends on who comes last"
        )
        yield Problem("order", message, vertex, chunk, k)


def deadlocks(schedule: Schedule, step: Round, k: int, buffers: int) -> Iterator[Problem]:
    """Name the cycles of vertices that wait for each other for ever in round k."""
    for cycle in cycles(step, buffers):
        enough = buffers + 1
        while cycles(step, enough):
            enough += 1
        who = " and ".join(_wait(schedule, wait) for wait in cycle[:4]) + (" and so on" if len(cycle) > 4 else "")
        message = f"in round {k} {who}; with {enough} buffers instead of {buffers} this round can finish"
        yield Problem("deadlock", message, cycle[0].rank, cycle[0].chunk, k)


def _wait(schedule: Schedule, wait: Wait) -> str:
    if wait.on == wait.rank:
        reason = "a message from a lower rank that it has not taken yet (list them in rank order)"
    else:
        reason = f"{_vertex(schedule, wait.on)} to read that chunk"
    return f"{_vertex(schedule, wait.rank)} holds a message for chunk {wait.chunk} and waits for {reason}"


def _vertex(schedule: Schedule, vertex: int) -> str:
    return named([vertex], schedule.ranks if vertex < schedule.vertices else vertex + 1)

"""What if no rank had been slow: a data-parallel step as work between collectives, replayed at its peers' pace.

A step lasts from the end of one step's last collective to the end of the next one's (all ranks leave it together) and
is cut at every rank's arrivals at the matched collectives. Work goes on while a collective runs, unless most ranks were
seen waiting for it: then what follows depends on its end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringside.doctor.kineto.intervals import within
from ringside.doctor.kineto.match import Matched
from ringside.doctor.kineto.steps import Activity, RankSteps
from ringside.doctor.replay.graph import DependencyGraph
from ringside.doctor.replay.stragglers import Recording, lanes_recording

MOST_OPERATIONS = 4096
HELD_RATIO = 0.01
"""A rank waited for a collective if that took more than this share of the collective's duration."""


def collective_recording(
    matched: Matched, steps: Sequence[RankSteps], seen: Sequence[Activity], numbers: Sequence[int], world_size: int
) -> Recording | None:
    """Return the recording of steps cut at their collectives; None where steps do not hold the same collectives.

    Args:
        matched: The collectives of all ranks.
        steps: What each rank did, in the ranks' order.
        seen: When each rank worked and waited, in the same order.
        numbers: The steps to take.
        world_size: Ranks of the job.
    """
    rows = [np.flatnonzero((matched.steps == number) & ~np.isnan(matched.starts).any(axis=1)) for number in numbers]
    rows = [found[np.argsort(matched.starts[found].min(axis=1), kind="stable")] for found in rows]
    kinds = {tuple((matched.parts[row].kind, matched.parts[row].elements) for row in found) for found in rows}
    if len(kinds) != 1 or not len(rows[0]) or 2 * len(rows[0]) > MOST_OPERATIONS:
        return None
    # The first step has no step before it to begin after; it is used only where there is no other.
    count, first = len(rows[0]), 1 if len(rows) > 1 else 0
    work = np.zeros((count, len(rows) - first, len(steps)))
    held = np.zeros((count - 1, len(rows) - first, len(steps)), dtype=bool)
    for lane, (rank, activity) in enumerate(zip(steps, seen, strict=True)):
        for place, found in enumerate(rows[first:]):
            begin = matched.ends[rows[place], lane].max() if first else _begin(rank, numbers[0])
            arrivals, ends = matched.starts[found, lane], matched.ends[found, lane]
            # Work before each arrival, without the waiting in it.
            edges = np.maximum.accumulate(np.concatenate([[begin], arrivals]))
            segments = np.stack([edges[:-1], edges[1:]], axis=1)
            busy = segments[:, 1] - segments[:, 0] - within(activity.exposed, segments)
            work[:, place, lane] = np.maximum(busy, 0.0)
            # Held: between an arrival and the next the rank waited for that collective.
            gaps = np.stack([edges[1:-1], np.clip(ends[:-1], edges[1:-1], edges[2:])], axis=1)
            waited = within(activity.exposed, gaps)
            held[:, place, lane] = waited > HELD_RATIO * np.maximum(ends - arrivals, 0.0)[:-1]
    # What each collective took once all had arrived and the one before was done.
    transfer = np.zeros((count, len(rows) - first))
    for place, found in enumerate(rows[first:]):
        begun = (matched.starts[found] - matched.clocks).max(axis=1)
        done = np.median(matched.ends[found] - matched.clocks, axis=1)
        before = np.concatenate([[-np.inf], np.maximum.accumulate(done)[:-1]])
        transfer[:, place] = np.maximum(done - np.maximum(begun, before), 0.0)
    # The measured length of each step: from the last end of the step before to its own.
    lasts = np.array([np.median(matched.ends[found] - matched.clocks, axis=1).max() for found in rows])
    begins = lasts[:-1] if first else np.array([np.mean([_begin(rank, numbers[0]) for rank in steps])])
    # Work 0, transfer 0, work 1, ...: each work after the one before, and after a transfer that most ranks waited for.
    blocks = held.mean(axis=(1, 2)) >= 0.5
    after: list[list[int]] = []
    for index in range(count):
        before_work = [2 * index - 2] if index else []
        after.append([*before_work, *([2 * index - 1] if index and blocks[index - 1] else [])])
        after.append([2 * index, *([2 * index - 1] if index else [])])
    names = [f"{kind} {index}" for index in range(count) for kind in ("work", "transfer")]
    spread = np.broadcast_to(transfer[:, :, None], work.shape)
    seconds = np.stack([work, spread], axis=1).reshape(2 * count, *work.shape[1:])
    groups = [[2 * index + 1] for index in range(count)]
    across = frozenset(op for group in groups for op in group)
    graph = DependencyGraph(names=names, after=after, groups=groups, across=across)
    ranks = [rank.rank for rank in steps]
    return lanes_recording(graph, seconds, names, ranks, world_size, lasts[first:] - begins)


def _begin(rank: RankSteps, number: int) -> float:
    return float(rank.windows[int(np.flatnonzero(rank.numbers == number)[0]), 0])

"""A schedule run in the plainest way there is: the oracle for everything faster."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.schedule.schedule import Schedule


def chunk_bounds(elements: int, chunks: int) -> NDArray[np.int64]:
    """Return the chunks' offsets, int64 [chunks + 1]: chunk i is the elements `[i*E//C, (i+1)*E//C)`.

    Sizes differ by at most one element; with fewer elements than chunks some are empty.
    """
    return np.arange(chunks + 1, dtype=np.int64) * elements // chunks


def run(
    schedule: Schedule, inputs: NDArray[Any], op: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]] = np.add
) -> NDArray[Any]:
    """Return what every rank holds after `schedule`; only what its collective wants is meaningful.

    Args:
        schedule: The algorithm.
        inputs: Every rank's tensor, [ranks, elements], any dtype; not changed. Elements need not divide by the chunks.
            Where the collective lets a rank hold nothing at the start, its values are there but must not matter.
        op: Combines two arrays elementwise, lower ranks on the left.

    Returns:
        An array of the shape and dtype of `inputs`.

    Raises:
        UsageError: `inputs` has another shape.
    """
    if inputs.ndim != 2 or len(inputs) != schedule.ranks:
        raise UsageError(f"inputs must be [{schedule.ranks}, elements], one row per rank, not {list(inputs.shape)}")
    values: NDArray[Any] = np.concatenate([inputs, np.zeros_like(inputs, shape=(schedule.switches, inputs.shape[1]))])
    bounds = chunk_bounds(inputs.shape[1], schedule.chunks).tolist()
    for k in range(schedule.rounds):
        before = values.copy()
        additions: dict[tuple[int, int], list[int]] = defaultdict(list)
        for src, dst, chunk, reducing in schedule.round(k):
            part = slice(bounds[chunk], bounds[chunk + 1])
            if reducing:
                additions[dst, chunk].append(src)
            else:
                values[dst, part] = before[src, part]
        for (dst, chunk), sources in additions.items():
            part = slice(bounds[chunk], bounds[chunk + 1])
            terms = sources if dst >= schedule.ranks else [*sources, dst]
            values[dst, part] = reduce(op, [before[rank, part] for rank in sorted(terms)])
    return values[: schedule.ranks]


def contributions(schedule: Schedule) -> Iterator[NDArray[np.int64]]:
    """Yield what every chunk contains at the start of each round, and once more at the end.

    Yields:
        int64 [vertices, chunks, ranks], `rounds` + 1 times: how often chunk c on vertex v (ranks, then switches)
        contains the contribution of the rank in the last axis. What is undefined counts as nothing.
    """
    counts = np.zeros((schedule.vertices, schedule.chunks, schedule.ranks), dtype=np.int64)
    rank, chunk = np.nonzero(schedule.collective.holds(schedule.ranks, schedule.chunks))
    counts[rank, chunk, rank] = 1
    yield counts
    for k in range(schedule.rounds):
        step = schedule.round(k)
        copy, add = step.where(~step.reduce), step.where(step.reduce)
        after = counts.copy()
        after[copy.dst, copy.chunk] = counts[copy.src, copy.chunk]
        at_switch = add.where(add.dst >= schedule.ranks)
        after[at_switch.dst, at_switch.chunk] = 0
        np.add.at(after, (add.dst, add.chunk), counts[add.src, add.chunk])
        counts = after
        yield counts

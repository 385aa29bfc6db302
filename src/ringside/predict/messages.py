"""A schedule's rounds as messages: all chunks that go from one vertex to another in a round travel as one.

Large schedules list more transfers than memory holds: a round of `direct` among 24,576 ranks has 6e8. So a round comes
in blocks, those of a rotational schedule made one after the other from what rank 0 sends; and a stretch of rounds that
differ only in which chunks move comes once, with how often it happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.schedule import Round, Schedule, halving_doubling
from ringside.schedule.powers import fold_in, fold_out, largest_power, workers

Ints = NDArray[np.int64]

BLOCK = 1 << 21
"""Messages of a block at most, roughly."""
MOST_TRANSFERS = 1 << 27
"""Transfers that a round of a schedule without rotational symmetry may list."""


@dataclass(frozen=True, eq=False)
class Messages:
    """Messages of one round; arrays are int64 [messages].

    Args:
        src: Sender.
        dst: Receiver.
        chunks: How many chunks travel.
        added: How many of them are added to the receiver's; the others replace them.
        offset: Every rank r sends one message, number r, to rank r + offset (mod ranks); 0: it is not so.
    """

    src: Ints
    dst: Ints
    chunks: Ints
    added: Ints
    offset: int = 0

    def __len__(self) -> int:
        return len(self.src)


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive rounds with the same messages, but for which chunks they carry.

    Args:
        first: Number of the first of them.
        rounds: How many.
        schedule: Whose.
    """

    first: int
    rounds: int
    schedule: Schedule

    def blocks(self) -> Iterator[Messages]:
        """Yield the messages of one such round, in blocks; a vertex pair is in one block only."""
        if self.schedule.rotational:
            yield from _turned(self.schedule, self.first)
        else:
            yield _whole(self.schedule, self.first)


def stretches(schedule: Schedule) -> Iterator[Stretch]:
    """Yield the stretches of a schedule, in order; where it does not say so, every round is its own."""
    lengths = schedule.stretches or (1,) * schedule.rounds
    first = 0
    for rounds in lengths:
        if rounds:
            yield Stretch(first, rounds, schedule)
        first += rounds


def _whole(schedule: Schedule, k: int) -> Messages:
    """Return all messages of round k; of algorithms that would list too many chunks, without listing them."""
    if schedule.name == "halving_doubling" and schedule == halving_doubling(schedule.ranks):
        return _halved(schedule, k)
    if schedule.name == "hierarchical":
        found = _between_hosts(schedule, k)
        if found is not None:
            return found
    return merged(_round(schedule, k), schedule.vertices)


def _halved(schedule: Schedule, k: int) -> Messages:
    """Return round k of halving-doubling: half as many chunks to a partner half as far, and back again."""
    n, p = schedule.ranks, largest_power(schedule.ranks)
    levels, folded = p.bit_length() - 1, int(n > p)
    if folded and k in (0, schedule.rounds - 1):
        step = fold_in(n, 1) if k == 0 else fold_out(n, 1)
        src, dst = step.src.astype(np.int64), step.dst.astype(np.int64)
        chunks = np.full(len(src), p, dtype=np.int64)
        return Messages(src, dst, chunks, chunks if k == 0 else np.zeros_like(chunks))
    k -= folded
    distance = p >> (k + 1) if k < levels else 1 << (k - levels)
    rank = workers(n).astype(np.int64)
    chunks = np.full(p, distance, dtype=np.int64)
    return Messages(rank, rank[np.arange(p) ^ distance], chunks, chunks if k < levels else np.zeros_like(chunks))


def _between_hosts(schedule: Schedule, k: int) -> Messages | None:
    """Return round k between the hosts of a hierarchical schedule of equal hosts; None for any other round."""
    inners, outer, slices = schedule.parameters
    assert isinstance(inners, tuple)
    assert isinstance(outer, Schedule)
    local, inside = inners[0].ranks, inners[0].rounds
    equal = all(inner == inners[0] for inner in inners) and slices == inners[0].chunks
    if not equal or slices % local or not inside <= k < inside + outer.rounds:
        return None
    blocks = list(Stretch(k - inside, 1, outer).blocks())
    if len(blocks) != 1:
        return None
    one, lane = blocks[0], np.arange(local, dtype=np.int64)[:, None]
    ends = [
        np.where(end < outer.ranks, end * local + lane, end - outer.ranks + schedule.ranks)
        for end in (one.src, one.dst)
    ]
    each = slices // local
    chunks, added = (np.tile(count * each, local) for count in (one.chunks, one.added))
    return Messages(ends[0].ravel(), ends[1].ravel(), chunks, added)


def merged(step: Round, vertices: int) -> Messages:
    """Return the messages of a round, by sender and receiver."""
    key = step.src.astype(np.int64) * vertices + step.dst
    if len(key) and (np.diff(key) > 0).all():  # one chunk each, in order: nothing to merge
        return Messages(*np.divmod(key, vertices), np.ones_like(key), step.reduce.astype(np.int64))
    pairs, where, chunks = np.unique(key, return_inverse=True, return_counts=True)
    added = np.bincount(where.ravel(), weights=step.reduce, minlength=len(pairs)).astype(np.int64)
    return Messages(*np.divmod(pairs, vertices), chunks.astype(np.int64), added)


def _round(schedule: Schedule, k: int) -> Round:
    try:
        step = schedule.round(k)
    except MemoryError:
        step = None
    if step is None or len(step) > MOST_TRANSFERS:
        raise UsageError(
            f"round {k} of {schedule.name} among {schedule.ranks} ranks lists too many transfers to simulate them: "
            "use an even topology, for which price() has a closed form, or fewer ranks"
        )
    return step


def _turned(schedule: Schedule, k: int) -> Iterator[Messages]:
    """Yield the messages of all ranks of a rotational schedule, made from those of rank 0."""
    n = schedule.ranks
    mine = merged(schedule.representatives(k), n)
    rank = np.arange(n, dtype=np.int64)
    if len(mine) == 1:
        shape = np.ones(n, dtype=np.int64)
        yield Messages(rank, (rank + mine.dst) % n, shape * mine.chunks, shape * mine.added, int(mine.dst[0]))
        return
    step = max(1, BLOCK // n)
    for at in range(0, len(mine), step):
        part = slice(at, at + step)
        count = len(mine.dst[part])
        dst = (rank + mine.dst[part][:, None]) % n
        src, chunks, added = np.tile(rank, count), np.repeat(mine.chunks[part], n), np.repeat(mine.added[part], n)
        yield Messages(src, dst.ravel(), chunks, added)

"""A schedule's rounds as messages, and as max-plus steps of a clock per vertex."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import gcd

import numpy as np

from ringside.errors import UsageError
from ringside.predict.topology.wires import Floats, Ints, Wires
from ringside.schedule import Round, Schedule, halving_doubling, one_shot, reverse
from ringside.schedule.algorithms.doubling import fold_in, fold_out, largest_power, workers

# -------------------------------------------------------------------------------------------------
# A schedule's rounds as messages: all chunks that go from one vertex to another in a round travel as one.
#
# Large schedules list more transfers than memory holds: a round of `direct` among 24,576 ranks has 6e8. So a round
# comes in blocks, those of a rotational schedule made one after the other from what rank 0 sends; and a stretch of
# rounds that differ only in which chunks move comes once, with how often it happens.

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
        schedule, k = self.schedule, self.first
        if schedule.rotational:
            yield from _rotated(schedule.ranks, merged(schedule.representatives(k), schedule.ranks))
        elif schedule.name == "one_shot" and schedule == one_shot(schedule.ranks):
            dst = np.arange(1, schedule.ranks, dtype=np.int64)  # rank 0 sends its only chunk to everybody
            ones = np.ones_like(dst)
            yield from _rotated(schedule.ranks, Messages(np.zeros_like(dst), dst, ones, ones))
        elif schedule.name == "halving_doubling" and schedule == halving_doubling(schedule.ranks):
            yield _halved(schedule, k)
        elif schedule.name == "hierarchical" and isinstance(schedule.parameters[0], tuple):  # as it is made, not cut
            yield from _hierarchical(schedule, k)
        else:
            yield _listed(schedule, k)


def stretches(schedule: Schedule) -> Iterator[Stretch]:
    """Yield the stretches of a schedule, in order; where it lists none, every round is its own."""
    lengths = schedule.stretches or (1,) * schedule.rounds
    first = 0
    for rounds in lengths:
        if rounds:
            yield Stretch(first, rounds, schedule)
        first += rounds


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


def _hierarchical(schedule: Schedule, k: int) -> Iterator[Messages]:
    """Yield round k of a hierarchical schedule; where all hosts are equal, without listing every piece of a slice."""
    inners, outer, slices = schedule.parameters
    assert isinstance(inners, tuple)
    assert isinstance(outer, Schedule)
    assert isinstance(slices, int)
    inner, hosts = inners[0], len(inners)
    if any(host != inner for host in inners) or slices != inner.chunks or slices % inner.ranks:
        # Unequal hosts: refused before they list more than memory holds.
        chunks = outer.chunks * slices
        if sum(len(host.round(0)) * (chunks // host.chunks) for host in inners if host.rounds) > MOST_TRANSFERS:
            raise _too_many(schedule)
        yield _listed(schedule, k)
    elif inner.rounds <= k < inner.rounds + outer.rounds:
        # Between hosts, once for every rank of a host: each carries its share of the slices. Switches come last.
        local, each = schedule.ranks // hosts, slices // inner.ranks
        lane = np.arange(local, dtype=np.int64)[:, None]
        for block in Stretch(k - inner.rounds, 1, outer).blocks():
            ends = block.src, block.dst
            src, dst = (np.where(end < hosts, end * local + lane, end - hosts + schedule.ranks).ravel() for end in ends)
            yield Messages(src, dst, np.tile(block.chunks * each, local), np.tile(block.added * each, local))
    else:
        back = k - inner.rounds - outer.rounds
        there = Stretch(k, 1, inner) if k < inner.rounds else Stretch(back, 1, reverse(inner))
        # Inside every host alike; each chunk of the host's schedule is `outer.chunks` of the whole.
        host, pieces = inner.ranks * np.arange(hosts, dtype=np.int64)[:, None], outer.chunks
        for block in there.blocks():
            src, dst = ((end + host).ravel() for end in (block.src, block.dst))
            yield Messages(src, dst, np.tile(block.chunks * pieces, hosts), np.tile(block.added * pieces, hosts))


def merged(step: Round, vertices: int) -> Messages:
    """Return the messages of a round, by sender and receiver."""
    key = step.src.astype(np.int64) * vertices + step.dst
    if len(key) and (np.diff(key) > 0).all():  # one chunk each, in order: nothing to merge
        return Messages(*np.divmod(key, vertices), np.ones_like(key), step.reduce.astype(np.int64))
    pairs, where, chunks = np.unique(key, return_inverse=True, return_counts=True)
    added = np.bincount(where.ravel(), weights=step.reduce, minlength=len(pairs)).astype(np.int64)
    return Messages(*np.divmod(pairs, vertices), chunks.astype(np.int64), added)


def _listed(schedule: Schedule, k: int) -> Messages:
    """Return the messages of round k from all the transfers that the schedule lists."""
    try:
        step = schedule.round(k)
    except MemoryError:
        raise _too_many(schedule) from None
    if len(step) > MOST_TRANSFERS:
        raise _too_many(schedule)
    return merged(step, schedule.vertices)


def _too_many(schedule: Schedule) -> UsageError:
    return UsageError(
        f"{schedule.name} among {schedule.ranks} ranks lists too many transfers to simulate them: use an even "
        "topology, for which price() has a closed form, or fewer ranks"
    )


def _rotated(n: int, first: Messages) -> Iterator[Messages]:
    """Yield the messages of all `n` ranks of a round that looks the same from each, made from those of rank 0."""
    rank = np.arange(n, dtype=np.int64)
    if len(first) == 1:
        shape = np.ones(n, dtype=np.int64)
        yield Messages(rank, (rank + first.dst) % n, shape * first.chunks, shape * first.added, int(first.dst[0]))
        return
    step = max(1, BLOCK // n)
    for begin in range(0, len(first), step):
        part = slice(begin, begin + step)
        count = len(first.dst[part])
        dst = (rank + first.dst[part][:, None]) % n
        src, chunks, added = np.tile(rank, count), np.repeat(first.chunks[part], n), np.repeat(first.added[part], n)
        yield Messages(src, dst.ravel(), chunks, added)


# -------------------------------------------------------------------------------------------------
# Rounds as max-plus steps of a clock per vertex, vectorised; a ring's equal rounds cost two passes over it each.
#
# The step itself is in `PreparedRounds.step`; what it means is defined in `ringside.predict.simulate`. Clocks are
# float64 [vertices] for a tensor of one size, or [sizes, vertices] with the sizes as [sizes, 1]: every size by itself.


@dataclass(frozen=True, eq=False)
class Costs:
    """Messages and what they take; arrays are float64 [messages].

    Args:
        messages: Whose costs.
        alpha_s: From leaving to being there, seconds.
        wire: Seconds on the wire per byte of the *tensor*, others' share in it included.
        shared: Of that, what it is at least, whatever the message's own link.
    """

    messages: Messages
    alpha_s: Floats
    wire: Floats
    shared: Floats

    @cached_property
    def distinct(self) -> tuple[bool, bool]:
        """Whether no two have the same sender, and no two the same receiver."""
        ends = self.messages.src, self.messages.dst
        sends, takes = (int(np.bincount(vertex).max(initial=0)) <= 1 for vertex in ends)
        return sends, takes

    def of(self, vertex: int) -> list[int]:
        """Return the numbers of the messages that a vertex sends or takes."""
        if self.messages.offset:
            return [vertex, (vertex - self.messages.offset) % len(self.messages)]
        found: list[int] = np.flatnonzero((self.messages.src == vertex) | (self.messages.dst == vertex)).tolist()
        return found


@dataclass(eq=False)
class PreparedRounds:
    """One round, ready to be played for any size.

    Args:
        stretch: The round, and how often it comes.
        wires: What it runs over.
    """

    stretch: Stretch
    wires: Wires

    def __post_init__(self) -> None:
        self._kept: list[Costs] | None = None
        self._totals: list[Floats] = []  # by what is shared: seconds per byte of the tensor that go through each of it
        vertices, topology = self.wires.vertices, self.wires.topology
        most = max(vertices, topology.hosts * topology.nics)  # of anything that is shared
        share = 1.0 / self.stretch.schedule.chunks
        # Messages that every vertex sends and takes, and what it adds up, as a share of the tensor.
        counts = np.zeros((3, vertices))
        blocks = 0
        for block in self.stretch.blocks():
            shares = list(self.wires.shares(block.src, block.dst))
            counts[0] += np.bincount(block.src, minlength=vertices)
            counts[1] += np.bincount(block.dst, minlength=vertices)
            counts[2] += np.bincount(block.dst, weights=block.added * share, minlength=vertices)
            for kind, (whose, per_byte) in enumerate(shares):
                used, weights = whose >= 0, block.chunks * share * per_byte
                if kind == len(self._totals):
                    self._totals.append(np.zeros(most))
                self._totals[kind] += np.bincount(whose[used], weights=weights[used], minlength=most)
            blocks += 1
        if blocks <= 1:  # of more, each is made again whenever it is played: together they may not fit into memory
            self._kept = [self._cost(block, shares)] if blocks else []
        # Switches do no work.
        reduce, (sends, takes, added) = topology.reduce_bytes_per_s, counts * (np.arange(vertices) < topology.ranks)
        self.before, self.after = topology.overhead_s * sends, topology.overhead_s * takes
        self.adding: Floats = np.zeros(vertices) if reduce is None else added / reduce

    def _cost(self, block: Messages, shares: Iterable[tuple[Ints, Floats]]) -> Costs:
        """Return what messages take: each by itself, or as long as all that shares something with it takes there."""
        alpha, per_byte = self.wires.costs(block.src, block.dst)
        shared = np.zeros(len(block))
        for kind, (whose, _) in enumerate(shares):
            used = whose >= 0
            shared[used] = np.maximum(shared[used], self._totals[kind][whose[used]])
        return Costs(block, alpha, np.maximum(per_byte * block.chunks / self.stretch.schedule.chunks, shared), shared)

    def costs(self) -> Iterator[Costs]:
        """Yield the messages and what they take, in blocks."""
        if self._kept is not None:
            yield from self._kept
        else:
            yield from (self._cost(block, self.wires.shares(block.src, block.dst)) for block in self.stretch.blocks())

    # ---------------------------------------------------------------------------------------------- playing

    def step(self, ready: Floats, size_bytes: float | Floats) -> Floats:
        """Return when every vertex is done with the round, given when it was ready for it."""
        start = ready + self.before
        done: Floats = start.copy()
        # All clocks in a row, and where those of each size begin.
        clocks, begin = done.reshape(-1), np.arange(0, done.size, done.shape[-1])[:, None]
        for part in self.costs():
            src, dst, offset = part.messages.src, part.messages.dst, part.messages.offset
            if offset:  # every rank sends to the one `offset` further: slices, which are faster than indices
                leave = start + part.wire * size_bytes
                np.maximum(done, leave, out=done)
                leave += part.alpha_s
                np.maximum(done[..., offset:], leave[..., :-offset], out=done[..., offset:])
                np.maximum(done[..., :offset], leave[..., -offset:], out=done[..., :offset])
                continue
            leave = np.take(start, src, axis=-1) + part.wire * size_bytes
            for vertex, until, distinct in zip((src, dst), (leave, leave + part.alpha_s), part.distinct, strict=True):
                where, times = (begin + vertex).reshape(-1), until.reshape(-1)
                if distinct:
                    clocks[where] = np.maximum(clocks[where], times)
                else:
                    np.maximum.at(clocks, where, times)
        done += self.after + self.adding * size_bytes
        return done

    def play(self, ready: Floats, size_bytes: float | Floats, rounds: int) -> Floats:
        """Return `ready` after so many such rounds."""
        if rounds > 2 and self._kept and self._kept[0].messages.offset:
            played = self._shifted(self._kept[0], ready, size_bytes, rounds)
            if played is not None:
                return played
        for _ in range(rounds):
            ready = self.step(ready, size_bytes)
        return ready

    def _shifted(self, part: Costs, ready: Floats, size_bytes: float | Floats, rounds: int) -> Floats | None:
        """Play rounds in which every rank sends one message to the rank `offset` further, in two passes each.

        Ranks are put in the order in which messages go round. Times are taken relative to the latencies summed up from
        position 0, so that a hop costs no latency (but the one from the last position to the first). What every
        rank does alike in every round is added at the end.
        """
        n, offset = ready.shape[-1], part.messages.offset
        if gcd(offset, n) != 1:
            return None
        order = np.arange(n, dtype=np.int64) * offset % n
        wire = np.take(part.wire * size_bytes, order, axis=-1)
        passed = np.concatenate([[0.0], np.cumsum(part.alpha_s[order])])
        now, around = np.take(ready, order, axis=-1) - passed[:-1], passed[-1]
        sent = np.empty_like(now)
        # Views: of what was sent and of what is there next, at the first position and at all others.
        first, last, before, here = sent[..., 0], sent[..., -1], sent[..., :-1], sent[..., 1:]
        next_first, next_others = now[..., 0], now[..., 1:]
        for _ in range(rounds):
            np.add(now, wire, out=sent)
            np.maximum(here, before, out=next_others)
            np.maximum(first, last + around, out=next_first)
        done = np.take(now + passed[:-1], np.argsort(order), axis=-1)
        each: Floats = self.before + self.after + self.adding * size_bytes
        return done + rounds * each[..., :1]

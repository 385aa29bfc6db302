"""What a schedule sends where: counted, without any proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ringside.schedule.schedule import Round, Schedule, joined

Counts = NDArray[np.int64]

# Pairs counted before they are summed up.
_PENDING = 1 << 20


@dataclass(frozen=True, eq=False)
class Traffic:
    """Chunks that travel; a chunk is `1/chunks` of the tensor S (to within one element).

    Args:
        ranks: Number of ranks.
        chunks: Number of chunks.
        sent: Chunks that each vertex sends, int64 [ranks + switches].
        received: Chunks that each vertex receives, int64 [ranks + switches].
        reduced: Additions of a chunk that each vertex does, int64 [ranks + switches].
        ports: The most distinct peers that one *rank* sends to, or receives from, in one round.
        link_src: Sending vertex of every link that is used, int64 [links].
        link_dst: Receiving vertex, int64 [links].
        link_chunks: Chunks over that link, int64 [links].
        rotational: Links are those of rank 0 only; those of rank r are the same, r further.
    """

    ranks: int
    chunks: int
    sent: Counts
    received: Counts
    reduced: Counts
    ports: int
    link_src: Counts
    link_dst: Counts
    link_chunks: Counts
    rotational: bool = False

    @property
    def max_bytes_sent(self) -> Fraction:
        """What the busiest rank sends, in units of S."""
        return Fraction(int(self.sent[: self.ranks].max()), self.chunks)

    @property
    def max_bytes_received(self) -> Fraction:
        """What the busiest rank receives, in units of S."""
        return Fraction(int(self.received[: self.ranks].max()), self.chunks)

    @property
    def max_bytes_reduced(self) -> Fraction:
        """What the busiest rank adds up, in units of S."""
        return Fraction(int(self.reduced[: self.ranks].max()), self.chunks)

    @property
    def busiest_link(self) -> tuple[int, int] | None:
        """The (src, dst) over which most travels, the lowest of them; None when nothing is sent."""
        if not len(self.link_chunks):
            return None
        most = int(self.link_chunks.argmax())
        return int(self.link_src[most]), int(self.link_dst[most])

    @property
    def busiest_link_bytes(self) -> Fraction:
        """What travels over the busiest link in its direction, in units of S."""
        return Fraction(int(self.link_chunks.max(initial=0)), self.chunks)

    def links(self) -> Iterator[tuple[int, int, Fraction]]:
        """Yield every link that is used as (src, dst, what it carries in units of S), by src, then dst."""
        triples = list(zip(self.link_src.tolist(), self.link_dst.tolist(), self.link_chunks.tolist(), strict=True))
        if not self.rotational:
            yield from ((src, dst, Fraction(count, self.chunks)) for src, dst, count in triples)
            return
        for src in range(self.ranks):
            for dst, count in sorted(((src + dst) % self.ranks, count) for _, dst, count in triples):
                yield src, dst, Fraction(count, self.chunks)

    def matrix(self) -> Counts:
        """Return what every link carries in chunks, int64 [ranks + switches, ranks + switches], row = sender."""
        matrix = np.zeros((len(self.sent),) * 2, dtype=np.int64)
        turns = np.arange(self.ranks if self.rotational else 1, dtype=np.int64)[:, None]
        size = len(self.sent)
        matrix[(self.link_src + turns) % size, (self.link_dst + turns) % size] = self.link_chunks
        return matrix


def traffic(schedule: Schedule) -> Traffic:
    """Count what a schedule sends, per vertex and per link; malformed transfers are left out.

    A rotational schedule is counted by its representatives: `traffic(ring(24_576))` takes seconds, not hours.
    """
    if schedule.rotational:
        return rotational_traffic(schedule, *all_representatives(schedule))
    tally = TrafficTally(schedule)
    for k in range(schedule.rounds):
        step = schedule.round(k)
        tally.count(step.where(well_formed(schedule, step)))
    return tally.traffic()


def well_formed(schedule: Schedule, step: Round) -> NDArray[np.bool_]:
    """Return which transfers can be, bool [transfers]: their vertices and chunk exist, and nobody sends to itself."""
    inside: NDArray[np.bool_] = (step.chunk >= 0) & (step.chunk < schedule.chunks) & (step.src != step.dst)
    for side in (step.src, step.dst):
        inside &= (side >= 0) & (side < schedule.vertices)
    return inside


class TrafficTally:
    """Counts the well-formed rounds of a schedule, one after the other."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._counts = np.zeros((3, schedule.vertices), dtype=np.int64)
        self._ports = 0
        nothing = np.zeros(0, dtype=np.int64)
        self._links = [(nothing, nothing)]
        self._pending = 0

    def count(self, step: Round) -> None:
        """Count one round."""
        size, ranks = self._schedule.vertices, self._schedule.ranks
        sent, received, reduced = self._counts
        sent += np.bincount(step.src, minlength=size)
        received += np.bincount(step.dst, minlength=size)
        reduced += np.bincount(step.dst[step.reduce], minlength=size)
        pairs, times = np.unique(step.src.astype(np.int64) * size + step.dst, return_counts=True)
        for side in np.divmod(pairs, size):
            self._ports = max(self._ports, int(np.bincount(side, minlength=ranks)[:ranks].max()))
        if size > ranks:
            # A switch has no value of its own: of each fold the first message is not an addition.
            at_switch = step.where(step.reduce & (step.dst >= ranks))
            targets = np.unique(at_switch.dst.astype(np.int64) * self._schedule.chunks + at_switch.chunk)
            reduced -= np.bincount(targets // self._schedule.chunks, minlength=size)
        self._links.append((pairs, times))
        self._pending += len(pairs)
        if self._pending > _PENDING:
            self._links = [self._summed()]
            self._pending = len(self._links[0][0]) // 2

    def _summed(self) -> tuple[Counts, Counts]:
        pairs, times = (np.concatenate(arrays) for arrays in zip(*self._links, strict=True))
        unique, where = np.unique(pairs, return_inverse=True)
        total = np.zeros(len(unique), dtype=np.int64)
        np.add.at(total, where, times)
        return unique, total

    def traffic(self) -> Traffic:
        """Return what was counted."""
        pairs, total = self._summed()
        src, dst = np.divmod(pairs, self._schedule.vertices)
        sent, received, reduced = self._counts
        schedule = self._schedule
        return Traffic(schedule.ranks, schedule.chunks, sent, received, reduced, self._ports, src, dst, total)


def all_representatives(schedule: Schedule) -> tuple[Counts, Round]:
    """Return the representatives of all rounds of a rotational schedule, and the round of each, int64 [transfers]."""
    steps = [schedule.representatives(k) for k in range(schedule.rounds)]
    number = np.repeat(np.arange(schedule.rounds, dtype=np.int64), [len(step) for step in steps])
    return number, joined(steps)


def rotational_traffic(schedule: Schedule, number: Counts, step: Round) -> Traffic:
    """Count a rotational schedule, given what `all_representatives` says."""
    n = schedule.ranks
    keep = well_formed(schedule, step)
    number, step = number[keep], step.where(keep)
    per_link = np.bincount(step.dst, minlength=n)
    used = np.flatnonzero(per_link)
    contacts = np.unique(number * n + step.dst) // n
    ports = int(np.bincount(contacts).max(initial=0))
    sent = np.full(n, len(step), dtype=np.int64)
    reduced = np.full(n, int(step.reduce.sum()), dtype=np.int64)
    links = np.zeros_like(used), used, per_link[used]
    return Traffic(n, schedule.chunks, sent, sent, reduced, ports, *links, rotational=True)

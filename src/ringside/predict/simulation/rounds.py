"""Rounds as max-plus steps of a clock per vertex, vectorised; a ring's equal rounds cost two passes over it each.

The step itself is in `PreparedRounds.step`; what it means is defined in `ringside.predict.simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

import numpy as np
from numpy.typing import NDArray

from ringside.predict.simulation.messages import Messages, Stretch
from ringside.predict.topology.wires import Wires

Floats = NDArray[np.float64]


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
        src, dst = self.messages.src, self.messages.dst
        return len(np.unique(src)) == len(src), len(np.unique(dst)) == len(dst)

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
        sends: Messages that every vertex sends, float64 [vertices].
        takes: Messages that it takes.
        added: What it adds up, as a share of the tensor; switches add while they receive.
    """

    stretch: Stretch
    wires: Wires
    sends: Floats = field(init=False)
    takes: Floats = field(init=False)
    added: Floats = field(init=False)

    def __post_init__(self) -> None:
        self._kept: list[Costs] | None = None
        self._totals: list[Floats] = []  # by what is shared: seconds per byte of the tensor that go through each of it
        vertices = self.wires.vertices
        share = 1.0 / self.stretch.schedule.chunks
        counts = np.zeros((3, vertices))
        blocks = 0
        for block in self.stretch.blocks():
            counts[0] += np.bincount(block.src, minlength=vertices)
            counts[1] += np.bincount(block.dst, minlength=vertices)
            counts[2] += np.bincount(block.dst, weights=block.added * share, minlength=vertices)
            for kind, (whose, per_byte) in enumerate(self.wires.shares(block.src, block.dst)):
                used = whose >= 0
                through = np.bincount(whose[used], weights=(block.chunks * share * per_byte)[used]).astype(np.float64)
                if kind == len(self._totals):
                    self._totals.append(np.zeros(1))
                total = np.zeros(max(len(self._totals[kind]), len(through)))
                for part in (self._totals[kind], through):
                    total[: len(part)] += part
                self._totals[kind] = total
            blocks += 1
            first = block
        self.sends, self.takes, self.added = counts
        if blocks <= 1:  # of more, each is made again whenever it is played: together they may not fit into memory
            self._kept = [self._cost(first)] if blocks else []
        ranks = self.wires.topology.ranks
        overhead_s, reduce = self.wires.topology.overhead_s, self.wires.topology.reduce_bytes_per_s
        here = (np.arange(self.wires.vertices) < ranks).astype(np.float64)
        self.before = overhead_s * self.sends * here
        self.after = overhead_s * self.takes * here
        self.adding = np.zeros_like(here) if reduce is None else self.added * here / reduce

    def _cost(self, block: Messages) -> Costs:
        """Return what messages take: each by itself, or as long as all that shares something with it takes there."""
        alpha, per_byte = self.wires.costs(block.src, block.dst)
        shared = np.zeros(len(block))
        for kind, (whose, _) in enumerate(self.wires.shares(block.src, block.dst)):
            used = whose >= 0
            shared[used] = np.maximum(shared[used], self._totals[kind][whose[used]])
        return Costs(block, alpha, np.maximum(per_byte * block.chunks / self.stretch.schedule.chunks, shared), shared)

    def costs(self) -> Iterator[Costs]:
        """Yield the messages and what they take, in blocks."""
        if self._kept is not None:
            yield from self._kept
        else:
            yield from map(self._cost, self.stretch.blocks())

    # ---------------------------------------------------------------------------------------------- playing

    def step(self, ready: Floats, size_bytes: float) -> Floats:
        """Return when every vertex is done with the round, given when it was ready for it, float64 [vertices]."""
        start = ready + self.before
        done: Floats = start.copy()
        for part in self.costs():
            src, dst, offset = part.messages.src, part.messages.dst, part.messages.offset
            if offset:  # every rank sends to the one `offset` further: slices, which are faster than indices
                leave = start + part.wire * size_bytes
                np.maximum(done, leave, out=done)
                leave += part.alpha_s
                np.maximum(done[offset:], leave[:-offset], out=done[offset:])
                np.maximum(done[:offset], leave[-offset:], out=done[:offset])
                continue
            leave = start[src] + part.wire * size_bytes
            for vertex, until, distinct in zip((src, dst), (leave, leave + part.alpha_s), part.distinct, strict=True):
                if distinct:
                    done[vertex] = np.maximum(done[vertex], until)
                else:
                    np.maximum.at(done, vertex, until)
        done += self.after + self.adding * size_bytes
        return done

    def play(self, ready: Floats, size_bytes: float, rounds: int) -> Floats:
        """Return `ready` after so many such rounds."""
        if rounds > 2 and self._kept and self._kept[0].messages.offset:
            played = self._shifted(self._kept[0], ready, size_bytes, rounds)
            if played is not None:
                return played
        for _ in range(rounds):
            ready = self.step(ready, size_bytes)
        return ready

    def _shifted(self, part: Costs, ready: Floats, size_bytes: float, rounds: int) -> Floats | None:
        """Play rounds in which every rank sends one message to the rank `offset` further, in two passes each.

        Ranks are put in the order in which messages go round. Times are taken relative to the latencies summed up from
        position 0, so that a hop costs no latency (but the one from the last position to the first). What every
        rank does alike in every round is added at the end.
        """
        n, offset = len(ready), part.messages.offset
        if gcd(offset, n) != 1:
            return None
        order = np.arange(n, dtype=np.int64) * offset % n
        wire = (part.wire * size_bytes)[order]
        alpha = part.alpha_s[order]
        passed = np.concatenate([[0.0], np.cumsum(alpha)])
        now, sent = ready[order] - passed[:-1], np.empty(n)
        around = passed[-1]
        before, here = sent[:-1], sent[1:]  # views: written by np.add below
        for _ in range(rounds):
            np.add(now, wire, out=sent)
            np.maximum(here, before, out=now[1:])
            now[0] = max(sent[0], sent[-1] + around)
        done = np.empty(n)
        done[order] = now + passed[:-1]
        each = self.before + self.after + self.adding * size_bytes
        return done + rounds * float(each[0])

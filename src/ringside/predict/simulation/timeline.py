"""What a simulation found: when every rank finished, every round's times, and the critical path."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from ringside.predict.simulation.critical_path import Culprit, PathHop, SentMessages, find_culprits, hop_before
from ringside.predict.simulation.messages import stretches
from ringside.predict.simulation.rounds import PreparedRounds
from ringside.predict.topology.topology import Topology
from ringside.predict.topology.wires import wires_for
from ringside.schedule import Schedule
from ringside.text import duration, giga, size

Floats = NDArray[np.float64]

KEPT = 1 << 22
"""Times (rounds x vertices) that are all kept, 32 MB; of larger simulations some are, and the rest is played again."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule played over a topology.

    Args:
        schedule: What was played, pipelined if that was requested.
        topology: Over what.
        size_bytes: Of the tensor.
        late: By rank, how much later it began, seconds.
        final: When every vertex had finished, float64 [vertices].
        checkpoints: When every vertex was ready for rounds 0, `every`, 2 `every` ..., float64 [checkpoints, vertices].
        every: Rounds between them; 1: all are kept.
    """

    schedule: Schedule
    topology: Topology
    size_bytes: float
    late: dict[int, float]
    final: Floats = field(repr=False)
    checkpoints: Floats = field(repr=False)
    every: int = 1

    @property
    def finish_seconds(self) -> Floats:
        """When every rank has finished, seconds, float64 [ranks]."""
        return self.final[: self.schedule.ranks]

    @property
    def seconds(self) -> float:
        """When the last rank has finished."""
        return float(self.finish_seconds.max())

    @property
    def algbw(self) -> float:
        """Bytes of the tensor per second; 0 where nothing takes any time."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def busbw(self) -> float:
        """The algorithm's bandwidth times what its collective moves at least per rank, as nccl-tests defines it."""
        return self.algbw * float(self.schedule.collective.lower_bound_bytes(self.schedule.ranks))

    @property
    def ready_seconds(self) -> Floats | None:
        """When every vertex was ready for every round (its last row: finished), float64 [rounds + 1, vertices].

        None where that is more than 4 million times; `ready_for` has any of them.
        """
        return self.checkpoints if self.every == 1 else None

    def ready_for(self, k: int) -> Floats:
        """Return when every vertex was ready for round `k` (k = rounds: finished), float64 [vertices]."""
        return next(iter(self._states(k, k + 1)))

    def sent(self, first: int = 0, last: int | None = None) -> Iterator[SentMessages]:
        """Yield the messages of rounds `first` to `last` (not included; None: to the end)."""
        end = self.schedule.rounds if last is None else min(last, self.schedule.rounds)
        for k, ready, round_ in zip(range(first, end), self._states(first, end), self._rounds(first, end), strict=True):
            start = ready + round_.before
            for part in round_.costs():
                begin = start[part.messages.src]
                leave = begin + part.wire * self.size_bytes
                carried = np.asarray(part.messages.chunks * (self.size_bytes / self.schedule.chunks), dtype=np.float64)
                arrive: Floats = leave + part.alpha_s
                yield SentMessages(k, part.messages.src, part.messages.dst, carried, begin, leave, arrive)

    # ---------------------------------------------------------------------------------------------- why

    @cached_property
    def critical_path(self) -> tuple[PathHop, ...]:
        """What the last rank waited for, and what that waited for, back to the start; from the start on.

        Consecutive pieces touch: together they last from 0 to `seconds`. Where two things ended at once, the path goes
        along the message. Rounds in which a vertex is busy with messages to the same peer are one piece.
        """
        path: list[PathHop] = []
        vertex = int(self.finish_seconds.argmax())
        end_s, top = self.seconds, self.schedule.rounds
        while top > 0:
            bottom = (top - 1) // max(self.every, 64) * max(self.every, 64)
            played = list(zip(self._states(bottom, top), self._rounds(bottom, top), strict=True))
            for k in range(top - 1, bottom - 1, -1):
                hop = hop_before(k, vertex, end_s, *played[k - bottom], self.size_bytes)
                vertex, end_s = hop.src, hop.begin_s
                last = path[-1] if path else None
                if last is not None and (hop.src, hop.dst, hop.peer) == (last.src, last.src, last.peer) == last[1:4]:
                    path.pop()
                    wire_s, shared_s = hop.wire_s + last.wire_s, hop.shared_s + last.shared_s
                    hop = hop._replace(end_s=last.end_s, wire_s=wire_s, shared_s=shared_s)
                if hop.end_s > hop.begin_s or hop.src != hop.dst:
                    path.append(hop)
            top = bottom
        if end_s > 0:
            path.append(PathHop(-1, vertex, vertex, -1, 0.0, end_s, 0.0, 0.0))
        return tuple(reversed(path))

    @property
    def guilty(self) -> Culprit:
        """The rank or link that puts off the end by most, by the critical path."""
        return self.blamed[0]

    @cached_property
    def blamed(self) -> tuple[Culprit, ...]:
        """All ranks and links on the critical path that put off its end, the worst first; or nobody."""
        return find_culprits(self.critical_path, self.schedule, self.topology, self.seconds)

    @property
    def shares(self) -> dict[str, float]:
        """Of the critical path: seconds of `late`, `alpha`, `wire` and `work` (adding up, messages), by kind of link.

        Keys are such as `alpha nvswitch` and `wire infiniband`, and `late`, `work`.
        """
        found: dict[str, float] = {}
        for hop in self.critical_path:
            if hop.round < 0:
                found["late"] = found.get("late", 0.0) + hop.end_s
                continue
            kind = self.topology.class_of(hop.src, hop.peer) if hop.peer >= 0 else ""
            work = hop.end_s - hop.begin_s - hop.wire_s - hop.alpha_s
            for key, seconds in ((f"alpha {kind}", hop.alpha_s), (f"wire {kind}", hop.wire_s), ("work", work)):
                if seconds > 1e-12 * self.seconds:
                    found[key] = found.get(key, 0.0) + seconds
        return found

    # ---------------------------------------------------------------------------------------------- playing again

    def _states(self, first: int, end: int) -> Iterator[Floats]:
        """Yield when everybody was ready for rounds `first` to `end` - 1."""
        if self.every == 1:
            yield from self.checkpoints[first:end]
            return
        at = first // self.every * self.every
        ready = self.checkpoints[at // self.every]
        for round_ in self._rounds(at, end):
            if at >= first:
                yield ready
            at += 1
            if at < end:
                ready = round_.play(ready, self.size_bytes, 1)
        if at < end:
            yield self.final

    def _rounds(self, first: int, end: int) -> Iterator[PreparedRounds]:
        for round_ in self._prepared if self.schedule.stretches else self._made(first, end):
            begun, rounds = round_.stretch.first, round_.stretch.rounds
            yield from (round_,) * (min(end, begun + rounds) - max(first, begun))

    @cached_property
    def _prepared(self) -> tuple[PreparedRounds, ...]:
        return tuple(self._made(0, self.schedule.rounds))

    def _made(self, first: int, end: int) -> Iterator[PreparedRounds]:
        wires = wires_for(self.schedule, self.topology)
        for stretch in stretches(self.schedule):
            if stretch.first < end and stretch.first + stretch.rounds > first:
                yield PreparedRounds(stretch, wires)

    # ---------------------------------------------------------------------------------------------- words

    def describe(self) -> str:
        """Return in two lines what it takes and why."""
        return "\n".join(
            [
                f"{self.schedule.name} of {size(self.size_bytes)} over {self.topology.describe()}: "
                f"{duration(self.seconds)}, busbw {giga(self.busbw)} GB/s",
                f"guilty: {self.guilty}",
            ]
        )


def checkpoint_every(schedule: Schedule) -> int:
    """Return after how many rounds the times are kept: 1, or for large simulations the root of the rounds."""
    cells = (schedule.rounds + 1) * schedule.vertices
    return 1 if cells <= KEPT else max(isqrt(schedule.rounds), 1)

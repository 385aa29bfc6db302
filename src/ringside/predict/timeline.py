"""What a simulation found: when every rank finished, every round's times, and the critical path."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.predict.messages import stretches
from ringside.predict.simulate_rounds import Prepared
from ringside.predict.topology import Topology
from ringside.predict.wires import wires_for
from ringside.schedule import Schedule

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

KEPT = 1 << 22
"""Times (rounds x vertices) that are all kept, 32 MB; of larger simulations some are, and the rest is played again."""
WORTH_NAMING = 0.02
"""Of the whole time: a rank or link that costs less is not called guilty."""


class Hop(NamedTuple):
    """One piece of the critical path.

    Args:
        round: Its round; -1: before the first.
        src: Where it begins: a vertex.
        dst: Where it ends; `src` itself: that vertex was busy sending, or worked, or had nothing to do.
        peer: To whom the message went; -1: there was none.
        begin_s: When the vertex `src` was ready for it, seconds.
        end_s: When the vertex `dst` was done with it.
        wire_s: Of that, bytes on the wire.
        alpha_s: Of that, latency.
    """

    round: int
    src: int
    dst: int
    peer: int
    begin_s: float
    end_s: float
    wire_s: float
    alpha_s: float


class Guilty(NamedTuple):
    """Who is to blame for most of the time that would not have been needed.

    Args:
        kind: `late rank`, `slow link` or `nobody`.
        ranks: The rank, or the link's two ranks.
        seconds: What it costs on the critical path.
    """

    kind: str
    ranks: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        """Say it in words."""
        if self.kind == "nobody":
            return "nobody: no rank is late and no link slower than its kind on the critical path"
        who = " > ".join(map(str, self.ranks))
        return f"{self.kind} {who} costs {seconds_words(self.seconds)}"


class Sent(NamedTuple):
    """Messages of one round; arrays are [messages], times in seconds.

    Args:
        round: Its number.
        src: Senders, int64.
        dst: Receivers, int64.
        size_bytes: Of each, float64.
        begin_s: When it began, float64.
        leave_s: When it had left, float64.
        arrive_s: When it was there, float64.
    """

    round: int
    src: Ints
    dst: Ints
    size_bytes: Floats
    begin_s: Floats
    leave_s: Floats
    arrive_s: Floats


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule played over a topology.

    Args:
        schedule: What was played, pipelined if that was asked for.
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

    def sent(self, first: int = 0, last: int | None = None) -> Iterator[Sent]:
        """Yield the messages of rounds `first` to `last` (not included; None: to the end)."""
        end = self.schedule.rounds if last is None else min(last, self.schedule.rounds)
        for k, ready, round_ in zip(range(first, end), self._states(first, end), self._rounds(first, end), strict=True):
            start = ready + round_.before
            for part in round_.costs():
                begin = start[part.messages.src]
                leave = begin + part.wire * self.size_bytes
                carried = np.asarray(part.messages.chunks * (self.size_bytes / self.schedule.chunks), dtype=np.float64)
                arrive: Floats = leave + part.alpha_s
                yield Sent(k, part.messages.src, part.messages.dst, carried, begin, leave, arrive)

    # ---------------------------------------------------------------------------------------------- why

    @cached_property
    def critical_path(self) -> tuple[Hop, ...]:
        """What the last rank waited for, and what that waited for, back to the start; from the start on.

        Consecutive pieces touch: together they last from 0 to `seconds`. Where two things ended at once, the path goes
        along the message. Rounds in which a vertex is busy with messages to the same peer are one piece.
        """
        path: list[Hop] = []
        vertex = int(self.finish_seconds.argmax())
        end_s, top = self.seconds, self.schedule.rounds
        while top > 0:
            bottom = (top - 1) // max(self.every, 64) * max(self.every, 64)
            played = list(zip(self._states(bottom, top), self._rounds(bottom, top), strict=True))
            for k in range(top - 1, bottom - 1, -1):
                hop = _before(k, vertex, end_s, *played[k - bottom], self.size_bytes)
                vertex, end_s = hop.src, hop.begin_s
                last = path[-1] if path else None
                if last is not None and (hop.src, hop.dst, hop.peer) == (last.src, last.src, last.peer) == last[1:4]:
                    path.pop()
                    hop = hop._replace(end_s=last.end_s, wire_s=hop.wire_s + last.wire_s)
                if hop.end_s > hop.begin_s or hop.src != hop.dst:
                    path.append(hop)
            top = bottom
        if end_s > 0:
            path.append(Hop(-1, vertex, vertex, -1, 0.0, end_s, 0.0, 0.0))
        return tuple(reversed(path))

    @cached_property
    def guilty(self) -> Guilty:
        """The rank or link that puts off the end by most, by the critical path."""
        begun = self.critical_path[0] if self.critical_path else None
        late = begun.end_s if begun is not None and begun.round < 0 else 0.0
        worst = Guilty("late rank", (begun.src,), late) if begun is not None and late > 0 else Guilty("nobody", (), 0.0)
        for pair, seconds in self._excess().items():
            if seconds > worst.seconds:
                worst = Guilty("slow link", pair, seconds)
        return worst if worst.seconds >= WORTH_NAMING * self.seconds else Guilty("nobody", (), 0.0)

    def _excess(self) -> dict[tuple[int, int], float]:
        """Return by link how much less the path would take over one that is as its class says, seconds."""
        hops = [hop for hop in self.critical_path if hop.peer >= 0]
        src, dst = (np.array(ends, dtype=np.int64) for ends in ([hop.src for hop in hops], [hop.peer for hop in hops]))
        (alpha, per_byte), (plain_alpha, plain) = (
            wires_for(self.schedule, topology).costs(src, dst)
            for topology in (self.topology, replace(self.topology, overrides=()))
        )
        lost: dict[tuple[int, int], float] = {}
        slower = 1 - np.minimum(plain / per_byte, 1.0)
        for at in np.flatnonzero((slower > 0) | (alpha > plain_alpha)).tolist():
            hop = hops[at]
            more = hop.wire_s * float(slower[at])
            more += max(float(alpha[at] - plain_alpha[at]), 0.0) if hop.src != hop.dst else 0.0
            lost[hop.src, hop.peer] = lost.get((hop.src, hop.peer), 0.0) + more
        return lost

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

    def _rounds(self, first: int, end: int) -> Iterator[Prepared]:
        for round_ in self._prepared if self.schedule.stretches else self._made(first, end):
            begun, rounds = round_.stretch.first, round_.stretch.rounds
            yield from (round_,) * (min(end, begun + rounds) - max(first, begun))

    @cached_property
    def _prepared(self) -> tuple[Prepared, ...]:
        return tuple(self._made(0, self.schedule.rounds))

    def _made(self, first: int, end: int) -> Iterator[Prepared]:
        wires = wires_for(self.schedule, self.topology)
        for stretch in stretches(self.schedule):
            if stretch.first < end and stretch.first + stretch.rounds > first:
                yield Prepared(stretch, wires)

    # ---------------------------------------------------------------------------------------------- words

    def describe(self) -> str:
        """Return in two lines what it takes and why."""
        return "\n".join(
            [
                f"{self.schedule.name} of {size_words(self.size_bytes)} over {self.topology.describe()}: "
                f"{seconds_words(self.seconds)}, busbw {self.busbw / 1e9:.4g} GB/s",
                f"guilty: {self.guilty}",
            ]
        )

    def _repr_html_(self) -> str:
        """Return it as a page fragment for notebooks: the sentence, a bar per rank, the critical path's shares."""
        lines = [f"<p>{html.escape(line)}</p>" for line in self.describe().splitlines()]
        return f"<div>{''.join(lines)}{_bars(self)}{_table(self)}</div>"


def checkpoint_every(schedule: Schedule) -> int:
    """Return after how many rounds the times are kept: 1, or for large simulations the root of the rounds."""
    cells = (schedule.rounds + 1) * schedule.vertices
    return 1 if cells <= KEPT else max(isqrt(schedule.rounds), 1)


def _before(k: int, vertex: int, end_s: float, ready: Floats, round_: Prepared, size_bytes: float) -> Hop:
    """Return the piece of the critical path that ends when `vertex` was done with round k."""
    begin = float(ready[vertex])
    best, hop = (begin + float(round_.before[vertex]), 0), Hop(k, vertex, vertex, -1, begin, end_s, 0.0, 0.0)
    for part in round_.costs():
        for at in part.of(vertex):
            src, dst, wire = int(part.messages.src[at]), int(part.messages.dst[at]), float(part.wire[at]) * size_bytes
            own, alpha = src == vertex, float(part.alpha_s[at])
            begin = float(ready[src])
            found = (begin + float(round_.before[src]) + wire + (0.0 if own else alpha), 1 if own else 2)
            if found > best:
                best, hop = found, Hop(k, src, vertex, dst, begin, end_s, wire, 0.0 if own else alpha)
    return hop


# ------------------------------------------------------------------------------------------------ for notebooks

_MOST_BARS = 64
_WIDTH, _ROW = 560, 12


def _bars(timeline: Timeline) -> str:
    """Return an SVG with a bar per rank, or per group of ranks: the latest of each."""
    finish = timeline.finish_seconds
    groups = np.array_split(np.arange(len(finish)), min(len(finish), _MOST_BARS))
    end = max(timeline.seconds, 1e-300)
    rows = []
    for at, group in enumerate(groups):
        last = float(finish[group].max())
        name = f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}"
        y, width = at * _ROW, _WIDTH * last / end
        title = f"<title>rank {name}: {seconds_words(last)}</title>"
        rows.append(
            f'<text x="64" y="{y + 9}" text-anchor="end" font-size="9" fill="currentColor">{name}</text>'
            f'<rect x="70" y="{y + 2}" width="{width:.2f}" height="{_ROW - 4}" fill="#3b7dd8">{title}</rect>'
        )
    height = len(groups) * _ROW
    label = f"finish time by rank, 0 to {seconds_words(end)}"
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH + 80}" height="{height}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(rows)}</svg>'
    )


def _table(timeline: Timeline) -> str:
    rows = sorted(timeline.shares.items(), key=lambda item: -item[1])
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{seconds_words(took)}</td></tr>" for name, took in rows)
    return f"<table><caption>critical path</caption>{cells}</table>" if rows else ""


def seconds_words(seconds: float) -> str:
    """Return a duration in the unit that suits it, four digits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-9:.4g} ns" if seconds > 0 else "0 s"


def size_words(size_bytes: float) -> str:
    """Return a size in the decimal unit that suits it, four digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.4g} B"

"""Which messages one vertex sends and receives in a collective, in which order: worked out once for all that are alike.

What follows from the schedule and from how long the chunks are is the same in every step of a training: a `Route`.
`ringside.engine.net.exchange.run` walks it. Pure.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringside.engine.net.exchange.message_size import LEAST_ORDERED_BYTES, rounds_apart
from ringside.engine.net.exchange.ordering import order_messages
from ringside.engine.net.exchange.plan import MessagePlan

_SHARED_BYTES = 1 << 16  # of chunks that share a message: copying more takes longer than sending them one by one

Length = int | tuple[int, ...] | None
"""Of a chunk, bytes: as a whole, or of the segments it is cut into already; None: never touched by this vertex."""

Parts = tuple[tuple[int, int, int], ...]
"""What a message carries: (chunk, segment, the receive it waits for) of each part, in order."""


class ReceiveSegment(NamedTuple):
    """One segment of one receive.

    Args:
        round: The schedule's round.
        number: Of the receive, in order of all of this vertex.
        chunk, segment: Where it goes.
        overwrite: It replaces what is there (one source), instead of being reduced into it.
        sources: Senders, ascending.
        own_position: Where this vertex's own contribution comes among theirs; -1: it has none (a switch).
        final: The segment has its last content here then.
        dependents: To whom something can be sent then.
        places: By sender, which message of its link it is, where messages travel in an order worked out; else empty.
    """

    round: int
    number: int
    chunk: int
    segment: int
    overwrite: bool
    sources: tuple[int, ...]
    own_position: int
    final: bool
    dependents: tuple[int, ...]
    places: tuple[int, ...] = ()


class RouteRound(NamedTuple):
    """What is received in one round.

    Args:
        number: Of the round.
        bundled: By sender whose chunks share one message, how many of them there are.
        segments: What is received, segment by segment.
    """

    number: int
    bundled: Mapping[int, int]
    segments: tuple[tuple[ReceiveSegment, ...], ...]


@dataclass(frozen=True, eq=False)
class Route:
    """One vertex's messages.

    Args:
        order: What it receives, in an order worked out; None: round by round.
        rounds: What it receives, round by round, where there is no such order; rounds without are left out.
        apart: Messages of a round are sent when those of the one before it have been received.
        sends: By receiver, its messages: their round, and what they carry.
        counts: By sender, how many messages come where none carries several chunks.
    """

    order: tuple[ReceiveSegment, ...] | None
    rounds: tuple[RouteRound, ...]
    apart: bool
    sends: tuple[tuple[int, tuple[tuple[int, Parts], ...]], ...]
    counts: tuple[tuple[int, int], ...]


def is_large(plan: MessagePlan, lengths: Sequence[Length]) -> bool:
    """Tell whether the order of messages matters: not through switches, nor for what is a matter of latency."""
    sizes = (sum(length) if isinstance(length, tuple) else length or 0 for length in lengths)
    return not plan.switches and max(sizes, default=0) >= LEAST_ORDERED_BYTES


@functools.lru_cache(maxsize=256)
def route_of(
    plan: MessagePlan, me: int, lengths: tuple[Length, ...], segment_bytes: int, window: int, ordered: bool
) -> Route:
    """Return the messages of one vertex.

    Args:
        plan: Its part of the schedule.
        me: Its number there.
        lengths: Of the chunks.
        segment_bytes: Of what is cut here.
        window: How many messages a link holds that were sent and not yet received.
        ordered: All vertices know the sizes of all chunks.
    """
    return _RouteBuilder(plan, me, lengths, segment_bytes).route(window, ordered and is_large(plan, lengths))


class _RouteBuilder:
    """Makes the route of one vertex; arguments as for `route_of`."""

    def __init__(self, plan: MessagePlan, me: int, lengths: tuple[Length, ...], segment_bytes: int) -> None:
        self._plan, self._lengths, self._segment = plan, lengths, segment_bytes
        self._me = me if me < plan.schedule.ranks else -1  # a switch contributes nothing of its own

    def route(self, window: int, large: bool) -> Route:
        """Return the route; for large chunks in an order that is worked out, where that pays."""
        plan = self._plan
        segments = tuple(self._segments(chunk) for chunk in range(plan.chunks)) if large else ()
        order = order_messages(plan.schedule, self._me, segments, window) if large else None
        counts: defaultdict[int, int] = defaultdict(int)
        for receive in (receive for receives in plan.rounds for receive in receives):
            for src in receive.sources:
                counts[src] += self._segments(receive.chunk)
        incoming = tuple((src, counts[src]) for src in plan.sources)
        if order is None:
            apart = large and rounds_apart(plan.schedule, segments)
            sends = tuple((dst, self._sends_by_round(dst)) for dst in plan.links)
            return Route(None, self._receives_by_round(), apart, sends, incoming)
        receives = tuple(self._receive(k, chunk, segment, places) for (k, chunk, segment), places in order.receives)
        in_order: list[tuple[int, tuple[tuple[int, Parts], ...]]] = []
        for dst, link in plan.links.items():
            after = {(send.round, send.chunk): send.after for send in link}
            messages = tuple((k, ((chunk, s, after[k, chunk]),)) for k, chunk, s in order.sends.get(dst, ()))
            in_order.append((dst, messages))
        return Route(receives, (), False, tuple(in_order), incoming)

    def _sends_by_round(self, dst: int) -> tuple[tuple[int, Parts], ...]:
        """Return the messages of a link round by round, in a round segment by segment of all its chunks."""
        messages: list[tuple[int, Parts]] = []
        for group in self._plan.outgoing[dst]:
            if len(group) > 1 and self._share_a_message([send.chunk for send in group]):
                parts = tuple((send.chunk, 0, send.after) for send in group if self._segments(send.chunk))
                messages.append((group[0].round, parts))
                continue
            for segment in range(max(self._segments(send.chunk) for send in group)):
                messages.extend(
                    (send.round, ((send.chunk, segment, send.after),))
                    for send in group
                    if segment < self._segments(send.chunk)
                )
        return tuple(messages)

    def _receives_by_round(self) -> tuple[RouteRound, ...]:
        """Return what is received, in the order of `_sends_by_round` at the other end."""
        rounds = []
        for k, receives in enumerate(self._plan.rounds):
            if not receives:
                continue
            several = self._plan.incoming[k].items()
            bundled = {src: sum(map(self._segments, some)) for src, some in several if self._share_a_message(some)}
            most = max(self._segments(receive.chunk) for receive in receives)
            segments = (
                tuple(self._receive(k, r.chunk, index) for r in receives if index < self._segments(r.chunk))
                for index in range(most)
            )
            rounds.append(RouteRound(k, bundled, tuple(segments)))
        return tuple(rounds)

    def _receive(self, k: int, chunk: int, segment: int, places: tuple[int, ...] = ()) -> ReceiveSegment:
        number = self._plan.receives[k, chunk]
        receive = next(receive for receive in self._plan.rounds[k] if receive.chunk == chunk)
        return ReceiveSegment(
            round=k,
            number=number,
            chunk=chunk,
            segment=segment,
            overwrite=receive.overwrite,
            sources=receive.sources,
            own_position=sum(src < self._me for src in receive.sources) if self._me >= 0 else -1,
            final=number in self._plan.finals,
            dependents=self._plan.dependents[number],
            places=places,
        )

    def _segments(self, chunk: int) -> int:
        """Return in how many segments a chunk travels."""
        length = self._lengths[chunk]
        assert length is not None, "the schedule uses a chunk for which there is no memory"
        return len(length) if isinstance(length, tuple) else -(-length // self._segment)

    def _share_a_message(self, chunks: Sequence[int]) -> bool:
        """Tell whether chunks of one round and link go in one message; both ends see the same sizes."""
        # What is cut already is large, and comes segment by segment.
        whole = [length for chunk in chunks if isinstance(length := self._lengths[chunk], int)]
        if len(whole) < len(chunks):
            return False
        return 0 < sum(whole) <= min(self._segment, _SHARED_BYTES)

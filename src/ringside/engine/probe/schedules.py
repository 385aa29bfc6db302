"""The schedules of probes, and what their messages' times say of a link's rate."""

from __future__ import annotations

from collections.abc import Sequence

from ringside.engine.net.exchange.types import HopTiming
from ringside.schedule import Round, Schedule, from_rounds


def ping_pong(pairs: Sequence[tuple[int, int]], times: int) -> list[list[tuple[int, int, int]]]:
    """Pairs send each other one message, forth and back, so many times: rounds of (sender, receiver, chunk)."""
    forth, back = [(a, b, 0) for a, b in pairs], [(b, a, 0) for a, b in pairs]
    return [forth, back] * times


def one_way(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """The first of each pair sends to the second, all at once: rounds of (sender, receiver, chunk)."""
    return [[(a, b, 0) for a, b in pairs]]


def all_pairs(n: int, times: int) -> list[list[tuple[int, int, int]]]:
    """Everybody sends chunk v, its own, to all others, again and again: each turn waits for nothing but its round."""
    return [[(v, w, v) for v in range(n) for w in range(n) if v != w]] * times


def probe_schedule(
    ranks: int, vertices: Sequence[int], chunks: int, rounds: Sequence[Sequence[tuple[int, int, int]]]
) -> Schedule:
    """Return the schedule of such rounds.

    Args:
        ranks: Of the group.
        vertices: The rank of each vertex.
        chunks: Their number.
        rounds: (Sender, receiver, chunk) of each message, by numbers of vertices.
    """
    made = [Round.of([(vertices[a], vertices[b], chunk, False) for a, b, chunk in one]) for one in rounds]
    return from_rounds("probe", ranks, chunks, made)


def rate_of(hop: HopTiming, segment: int) -> float:
    """Return bytes per second from the first segment's arrival to the last's."""
    return (hop.size_bytes - segment) / max(hop.last - hop.first, 1e-7)


def rate_together(hops: Sequence[HopTiming], segment: int) -> float:
    """Return bytes per second of messages that arrive beside each other, from the first segment to the last; 0: none.

    They are waited for one after the other, so of a later one alone only that it had come by then is known.
    """
    if not hops:
        return 0.0
    size, took = sum(hop.size_bytes for hop in hops), max(hop.last for hop in hops) - min(hop.first for hop in hops)
    return (size - segment) / max(took, 1e-7)

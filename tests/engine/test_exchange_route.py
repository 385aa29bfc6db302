"""A vertex's messages, worked out beforehand: both ends of every link agree on them, in any order and of any size."""

from __future__ import annotations

from collections import Counter

import pytest

from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.route import Length, ReceiveSegment, Route, is_large, route_of
from ringside.schedule import Schedule, by_name, pipelined

from .transports.schedules import schedules

SEGMENT, WINDOW = 1 << 13, 4


def routes(s: Schedule, lengths: tuple[Length, ...], *, ordered: bool) -> list[Route]:
    return [route_of(plan_messages(s, v), v, lengths, SEGMENT, WINDOW, ordered) for v in range(s.vertices)]


def taken(route: Route, src: int) -> list[tuple[int, int, int]]:
    """What comes on a link, (round, chunk, segment), in the order in which it was sent."""
    if route.order is not None:
        found = [
            (taking.places[taking.sources.index(src)], (taking.round, taking.chunk, taking.segment))
            for taking in route.order
            if src in taking.sources
        ]
        assert sorted(place for place, _ in found) == list(range(len(found)))
        return [part for _, part in sorted(found)]
    return [(t.round, t.chunk, t.segment) for t in takings(route) if src in t.sources]


def takings(route: Route) -> list[ReceiveSegment]:
    if route.order is not None:
        return list(route.order)
    return [taking for one in route.rounds for takings in one.segments for taking in takings]


def lengths_of(s: Schedule, kind: str) -> tuple[Length, ...]:
    if kind == "tiny":
        return (40,) * s.chunks
    if kind == "empty":
        return (0,) * s.chunks
    if kind == "cut":
        return tuple((SEGMENT,) * (8 + chunk % 3) for chunk in range(s.chunks))
    return tuple(SEGMENT * (8 + chunk % 3) + 4 * chunk for chunk in range(s.chunks))


@pytest.mark.parametrize("kind", ["tiny", "empty", "cut", "large"])
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_both_ends_of_a_link_agree(ranks: int, ordered: bool, kind: str) -> None:
    for s in schedules(ranks, switches=True):
        lengths = lengths_of(s, kind)
        all_routes = routes(s, lengths, ordered=ordered)
        for dst, route in enumerate(all_routes):
            for src, count in route.counts:
                sent = dict(all_routes[src].sends)[dst]
                parts = [(k, chunk, segment) for k, some in sent for chunk, segment, _ in some]
                assert parts == taken(route, src), f"{s.name}({ranks}): link {src} -> {dst}"
                if all(len(some) == 1 for _, some in sent):
                    assert count == len(sent)
                for one in route.rounds:
                    chunks = [len(some) for k, some in sent if k == one.number and len(some) > 1]
                    assert chunks == ([one.bundled[src]] if one.bundled.get(src, 0) > 1 else [])


@pytest.mark.parametrize("ordered", [True, False])
def test_every_segment_of_every_receive_is_taken_once_and_a_chunk_in_the_order_of_its_rounds(ordered: bool) -> None:
    for s in schedules(5, switches=True):
        for vertex, route in enumerate(routes(s, lengths_of(s, "large"), ordered=ordered)):
            plan = plan_messages(s, vertex)
            found = Counter((t.number, t.segment) for t in takings(route))
            receives = [receive for some in plan.rounds for receive in some]
            segments = [-(-(SEGMENT * (8 + one.chunk % 3) + 4 * one.chunk) // SEGMENT) for one in receives]
            assert found == Counter((at, segment) for at, n in enumerate(segments) for segment in range(n))
            for chunk in range(s.chunks):
                for segment in range(12):
                    mine = [t.round for t in takings(route) if (t.chunk, t.segment) == (chunk, segment)]
                    assert mine == sorted(mine)


def test_one_that_is_alike_is_worked_out_once() -> None:
    """What is alike is what both the lengths and the way of cutting say; another vertex has another."""
    s = by_name("ring", 4)
    plan = plan_messages(s, 1)
    first = route_of(plan, 1, lengths_of(s, "cut"), SEGMENT, WINDOW, True)
    assert route_of(plan, 1, lengths_of(s, "cut"), SEGMENT, WINDOW, True) is first
    for other in (
        route_of(plan, 1, lengths_of(s, "large"), SEGMENT, WINDOW, True),
        route_of(plan, 1, lengths_of(s, "large"), SEGMENT * 2, WINDOW, True),
        route_of(plan_messages(s, 2), 2, lengths_of(s, "cut"), SEGMENT, WINDOW, True),
    ):
        assert other is not first
        assert other.sends != first.sends


def test_an_order_is_worked_out_for_large_chunks_only_and_not_through_switches() -> None:
    s = by_name("recursive_doubling", 6)
    large = (1 << 16,)
    assert is_large(plan_messages(s, 0), large)
    assert is_large(plan_messages(s, 0), ((1 << 15, 1 << 15),))
    assert not is_large(plan_messages(s, 0), ((1 << 16) - 1,))
    assert not is_large(plan_messages(by_name("in_network", 4), 0), large)
    assert route_of(plan_messages(s, 0), 0, large, 1 << 12, WINDOW, True).order is not None
    assert route_of(plan_messages(s, 0), 0, large, 1 << 12, WINDOW, False).order is None
    assert route_of(plan_messages(s, 0), 0, (1 << 12,), 1 << 9, WINDOW, True).order is None


def test_rounds_are_kept_apart_where_they_fit_together_without_a_pause() -> None:
    for name, apart in (("halving_doubling", True), ("ring", False)):
        s = by_name(name, 8)
        assert {route.apart for route in routes(s, (8 * SEGMENT,) * s.chunks, ordered=True)} == {apart}, name
        assert not any(route.apart for route in routes(s, (8 * SEGMENT,) * s.chunks, ordered=False))
    s = pipelined(by_name("halving_doubling", 8), 16)
    assert not any(route.apart for route in routes(s, (8 * SEGMENT,) * s.chunks, ordered=True))


def test_a_switch_adds_nothing_of_its_own() -> None:
    s = by_name("in_network", 3)
    found = routes(s, (100,) * s.chunks, ordered=True)
    assert {taking.own_position for taking in takings(found[3])} == {-1}
    assert all(taking.own_position >= 0 for route in found[:3] for taking in takings(route))


def test_the_largest_chunk_decides_whether_the_order_of_messages_matters() -> None:
    plan = plan_messages(by_name("ring", 3), 0)
    for lengths, large in (
        ((0, 1 << 16, None), True),
        (((1 << 16) - 1, 4, 0), False),
        (((1 << 15, 1 << 15), 0, 0), True),
        (((1 << 15, (1 << 15) - 1), 9, None), False),
        ((None, None, None), False),
    ):
        assert is_large(plan, lengths) == large, lengths
    assert not is_large(plan_messages(by_name("in_network", 3), 0), (1 << 20,))

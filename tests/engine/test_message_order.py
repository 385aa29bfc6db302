"""Orders that keep links busy: both ends agree, every order can be walked with the places there are, and it pays."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest

from ringside.engine.net.exchange.ordering import (
    RULES,
    WORTH_IT,
    ListSchedule,
    MessageGraph,
    MessageOrder,
    by_tail,
    find_order,
    order_messages,
)
from ringside.engine.net.exchange.plan import plan_messages
from ringside.schedule import Schedule, by_name, pipelined, traffic

from .transports.schedules import schedules

WINDOW = 4


def orders(s: Schedule, segments: int, window: int = WINDOW) -> list[MessageOrder]:
    """Every vertex's order by each rule's play, whether it pays or not; none if no play comes to its end."""
    simulated = [ListSchedule(MessageGraph(s), [segments] * s.chunks, window, rule) for rule in RULES]
    done = [play for play in simulated if play.complete]
    return list(min(done, key=lambda play: play.slots).orders()) if done else []


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("segments", [1, 3])
def test_both_ends_of_every_link_agree(ranks: int, segments: int) -> None:
    for s in schedules(ranks):
        all_orders = orders(s, segments)
        assert len(all_orders) == s.vertices, s.name
        for vertex, order in enumerate(all_orders):
            plan = plan_messages(s, vertex)
            expected = {
                (k, r.chunk, segment)
                for k, receives in enumerate(plan.rounds)
                for r in receives
                for segment in range(segments)
            }
            assert {take.part for take in order.receives} == expected, s.name
            assert len(order.receives) == len(expected), s.name
            for part, places in order.receives:
                sources = plan.rounds[part[0]][[r.chunk for r in plan.rounds[part[0]]].index(part[1])].sources
                for src, place in zip(sources, places, strict=True):
                    assert all_orders[src].sends[vertex][place] == part, s.name


@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("window", [1, 2, 4])
def test_nobody_waits_in_a_circle(ranks: int, window: int) -> None:
    """Walk all vertices as the interpreter does: blocking, one take after the other, few places per link."""
    for s in schedules(ranks):
        simulated = [ListSchedule(MessageGraph(s), [3] * s.chunks, window, rule) for rule in RULES]
        assert any(play.complete for play in simulated), s.name
        for play in simulated:
            if play.complete:
                walk(s, list(play.orders()), window)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 9, 12])
@pytest.mark.parametrize(("window", "first", "ahead"), [(16, 4, 32), (16, 1, 2), (4, 4, 8), (4, 1, 2)])
def test_nobody_waits_in_a_circle_in_an_order_that_is_used(ranks: int, window: int, first: int, ahead: int) -> None:
    """There are fewer places than in the play: a few until a link's first message is taken, and for the next takes."""
    walked = 0
    for s in schedules(ranks):
        segments = [max(24 // s.chunks, 1)] * s.chunks
        used = [order_messages(s, vertex, segments, window) for vertex in range(s.vertices)]
        if not s.switches and None not in used:
            walk(s, [order for order in used if order is not None], window, first, ahead)
            walked += 1
    assert walked >= 3


def walk(s: Schedule, all_orders: list[MessageOrder], window: int, first: int = 0, ahead: int = 0) -> None:
    """Arguments beyond `window`: places of a link before anything is taken from it; takes ahead that have places."""
    plans = [plan_messages(s, vertex) for vertex in range(s.vertices)]
    after = [
        {(send.round, send.chunk): send.after for sends in plan.links.values() for send in sends} for plan in plans
    ]
    queues = {(src, dst): deque(parts) for src, order in enumerate(all_orders) for dst, parts in order.sends.items()}
    posted: dict[tuple[int, int], deque[tuple[int, int, int]]] = {link: deque() for link in queues}
    there: dict[tuple[int, int], int] = defaultdict(int)
    freed: dict[tuple[int, int], int] = defaultdict(int)
    done = [set[tuple[int, int]]() for _ in plans]  # (index of receive, segment)
    at = [0] * len(plans)

    def places_until(src: int, dst: int) -> int:
        limit = freed[src, dst] + (first if first and not freed[src, dst] else window)
        if not ahead:
            return limit
        expected = 0
        for (k, chunk, _), places in all_orders[dst].receives[at[dst] : at[dst] + ahead]:
            sources = next(r for r in plans[dst].rounds[k] if r.chunk == chunk).sources
            if src in sources:
                expected = max(expected, places[sources.index(src)] + 1)
        return max(first, min(limit, max(expected, freed[src, dst])))

    def leaving(vertex: int, chunk: int, segment: int) -> bool:
        return any((chunk, segment) == part[1:] for (src, _), q in posted.items() if src == vertex for part in q)

    moved = True
    while moved:
        moved = False
        for (src, dst), queue in queues.items():
            while queue and (after[src][queue[0][:2]] < 0 or (after[src][queue[0][:2]], queue[0][2]) in done[src]):
                posted[src, dst].append(queue.popleft())
            while posted[src, dst] and there[src, dst] < places_until(src, dst):
                posted[src, dst].popleft()
                there[src, dst] += 1
                moved = True
        for vertex, order in enumerate(all_orders):
            if at[vertex] == len(order.receives):
                continue
            (k, chunk, segment), places = order.receives[at[vertex]]
            receive = next(r for r in plans[vertex].rounds[k] if r.chunk == chunk)
            links = [(src, vertex) for src in receive.sources]
            here = all(there[link] > place for link, place in zip(links, places, strict=True))
            if here and not leaving(vertex, chunk, segment):
                done[vertex].add((plans[vertex].receives[k, chunk], segment))
                at[vertex] += 1
                for link in links:
                    freed[link] += 1
                moved = True
    assert at == [len(order.receives) for order in all_orders], f"{s.name} stands still"


@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [
        ("ring", 5, 1.0),
        ("halving_doubling", 3, 1.05),
        ("halving_doubling", 7, 1.08),
        ("recursive_doubling", 3, 1.05),
        ("recursive_doubling", 7, 1.05),
        ("tree", 8, 1.12),
        ("two_tree", 7, 1.08),
    ],
)
def test_links_stay_busy(name: str, ranks: int, most: float) -> None:
    """The play takes hardly longer than the busiest link needs; in the rounds' order it was up to 1.45 times."""
    s = by_name(name, ranks)
    segments = max(32 // s.chunks, 1)
    counted = traffic(s)
    busiest = max(int(counted.sent.max()), int(counted.received.max())) * segments
    graph = MessageGraph(s)
    assert min(ListSchedule(graph, [segments] * s.chunks, WINDOW, rule).slots for rule in RULES) <= most * busiest


@pytest.mark.parametrize(
    ("name", "pays"), [("recursive_doubling", True), ("tree", True), ("ring", False), ("direct", False)]
)
def test_only_an_order_that_pays_is_taken(name: str, pays: bool) -> None:
    s = by_name(name, 6)
    found = [order_messages(s, vertex, [max(32 // s.chunks, 1)] * s.chunks, WINDOW) for vertex in range(6)]
    assert [order is not None for order in found] == [pays] * 6


def test_what_would_take_long_is_left_to_the_rounds_order() -> None:
    s = pipelined(by_name("chain", 200), 64)
    assert order_messages(s, 0, [64] * s.chunks, WINDOW) is None
    assert [find_order(by_name("chain", ranks), (1,), WINDOW) is None for ranks in (112, 113)] == [False, True]


@pytest.mark.parametrize(("name", "ranks"), [("tree", 5), ("recursive_doubling", 7), ("halving_doubling", 7)])
def test_the_longest_chain_goes_first_even_where_another_rule_is_a_little_shorter(name: str, ranks: int) -> None:
    """What a play does not show: flows that share a link, which disturb other orders by much more than they save."""
    s = by_name(name, ranks)
    segments = [32 // s.chunks or 1] * s.chunks
    simulated = {rule: ListSchedule(MessageGraph(s), segments, WINDOW, rule) for rule in RULES}
    shortest = min(play.slots for play in simulated.values() if play.complete)
    assert simulated[by_tail].complete
    assert simulated[by_tail].slots <= 1.2 * shortest
    found = find_order(s, tuple(segments), WINDOW)
    assert found is not None
    assert found[1] == simulated[by_tail].slots
    assert [order_messages(s, v, segments, WINDOW) for v in range(ranks)] == list(simulated[by_tail].orders())


def test_a_ring_keeps_the_rounds_order_and_its_slots_are_its_bytes() -> None:
    s = by_name("ring", 5)
    assert order_messages(s, 0, [3] * s.chunks, WINDOW) is None
    assert find_order(s, (3,) * s.chunks, WINDOW) == (None, 2 * 4 * 3)
    assert WORTH_IT < 1

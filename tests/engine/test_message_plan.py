"""What one vertex sends and receives: both ends of every link agree, whatever the schedule."""

from __future__ import annotations

from collections import defaultdict

import pytest

from ringside.engine.net.exchange.plan import MessagePlan, plan_messages
from ringside.schedule import COLLECTIVES, Schedule, by_name, direct, ring, two_tree

from .transports.schedules import schedules


def plans(s: Schedule) -> list[MessagePlan]:
    return [plan_messages(s, vertex) for vertex in range(s.vertices)]


def arrivals(plan: MessagePlan, src: int) -> list[tuple[int, int]]:
    """What a vertex takes from a link, (round, chunk), in the order in which it takes it."""
    return [(k, r.chunk) for k, receives in enumerate(plan.rounds) for r in receives if src in r.sources]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8, 13])
def test_both_ends_of_a_link_agree(ranks: int) -> None:
    for s in [*schedules(ranks, switches=True), *(by_name(name, ranks) for name in COLLECTIVES)]:
        all_plans = plans(s)
        assert len({plan.hash for plan in all_plans}) == 1
        for dst, plan in enumerate(all_plans):
            senders = tuple(src for src in range(s.vertices) if dst in all_plans[src].links)
            assert plan.sources == senders, s.name
            for src in senders:
                sent = [(send.round, send.chunk) for send in all_plans[src].links[dst]]
                assert sent == arrivals(plan, src), f"{s.name}({ranks}): link {src} -> {dst}"


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_message_waits_for_the_last_receive_before_it_that_writes_its_chunk(ranks: int) -> None:
    for s in schedules(ranks, switches=True):
        for plan in plans(s):
            received = [(k, r.chunk) for k, receives in enumerate(plan.rounds) for r in receives]
            wakes = defaultdict(set)
            for dst, sends in plan.links.items():
                for send in sends:
                    before = [at for at, (k, chunk) in enumerate(received) if k < send.round and chunk == send.chunk]
                    assert send.after == (before[-1] if before else -1)
                    if before:
                        wakes[send.after].add(dst)
            assert [set(dsts) for dsts in plan.dependents] == [wakes[at] for at in range(len(received))]


def test_different_schedules_have_different_hashes() -> None:
    made = [s for ranks in (3, 4) for s in schedules(ranks, switches=True)]
    hashes = [plan_messages(s, 0).hash for s in made]
    assert len(set(hashes)) == len({(s.name, s.ranks, s.chunks, repr(s.parameters)) for s in made})


def test_what_is_added_up_at_once() -> None:
    """Only there may an average divide in the same step, so that nothing is rounded twice."""
    whole = {
        name: plan_messages(by_name(name, 4), 1).whole_folds for name in ("direct", "one_shot", "parameter_server")
    }
    assert all(whole.values()), whole
    assert not plan_messages(ring(4), 1).whole_folds
    assert not plan_messages(two_tree(4), 1).whole_folds
    assert plan_messages(ring(2), 0).whole_folds


def test_a_schedule_is_compiled_once() -> None:
    assert plan_messages(direct(6), 2) is plan_messages(direct(6), 2)

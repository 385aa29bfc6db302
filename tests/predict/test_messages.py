"""Message order: what an interpreter without rounds takes, event by event."""

import numpy as np
import pytest
from bench.lab.ordered_simulation import simulate_messages

from ringside.engine.net.exchange.ordering import order_messages
from ringside.errors import UsageError
from ringside.predict import LinkClass, LinkOverride, Topology, finish_seconds, price
from ringside.predict.simulation import rounds as messages_module
from ringside.predict.simulation.rounds import merged, stretches
from ringside.schedule import (
    ALGORITHMS,
    by_name,
    halving_doubling,
    hierarchical,
    ring,
    ring_reduce_scatter,
    tree,
    two_tree,
)


def star(n, alpha=1e-4, rate=1e7, **more):
    return Topology("star", (1,) * n, between=LinkClass("ethernet", alpha, rate), **more)


def last(schedule, topology, size, **how):
    return float(simulate_messages(schedule, topology, size, **how).max())


# ------------------------------------------------------------------------------------------------ message order


@pytest.mark.parametrize("n", [2, 3, 4, 7])
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_where_nothing_overlaps_it_is_the_rounds(name, n):
    topology, size = star(n), 1e6
    assert last(by_name(name, n), topology, size) == pytest.approx(price(by_name(name, n), topology, size), rel=0.02)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_never_faster_than_the_busiest_interface(name):
    if name == "in_network":
        return
    n, size, topology = 5, 4e6, star(5, alpha=0.0)
    schedule = by_name(name, n)
    sent, received = np.zeros(n), np.zeros(n)
    for k in range(schedule.rounds):
        step = schedule.round(k)
        sent += np.bincount(step.src, minlength=n) * size / schedule.chunks
        received += np.bincount(step.dst, minlength=n) * size / schedule.chunks
    least = max(sent.max(), received.max()) / 1e7
    took = last(schedule, topology, size, segment_bytes=1 << 16)
    assert least * (1 - 1e-9) <= took <= 2.2 * least * max(1, schedule.rounds if name == "chain" else 1)


def test_a_server_sends_back_while_it_still_receives():
    topology, size = star(4), 4e6
    schedule = by_name("parameter_server", 4)
    assert last(schedule, topology, size) < 0.6 * price(schedule, topology, size)
    whole = last(schedule, topology, size, segment_bytes=size)
    assert whole == pytest.approx(price(schedule, topology, size))


def test_unequal_flows_share_max_min_fair():
    # Rank 1's link to rank 0 is slow, so rank 2 gets what it leaves of rank 0's interface.
    topology = star(3, alpha=0.0).with_slow_link(1, 0, 10.0)
    schedule = by_name("direct_gather", 3)
    took = simulate_messages(schedule, topology, 3e6, segment_bytes=1e9)
    assert took[0] == pytest.approx(1e6 / 1e6)
    fast = simulate_messages(schedule, star(3, alpha=0.0), 3e6, segment_bytes=1e9)
    assert fast[0] == pytest.approx(2e6 / 1e7)


def test_work_and_lateness():
    topology = star(2, reduce_bytes_per_s=1e8, overhead_s=1e-3)
    ring_s = last(ring(2), topology, 2e6, segment_bytes=1e9)
    assert ring_s == pytest.approx(2 * (1e-4 + 0.1 + 1e-3) + 0.01)
    late = last(ring(2), topology, 2e6, segment_bytes=1e9, late={1: 0.5})
    assert late == pytest.approx(ring_s + 0.5)
    assert last(ring(2), topology, 0.0) == pytest.approx(2 * (1e-4 + 1e-3))


def test_small_chunks_share_a_message():
    topology = star(4, alpha=1e-3)
    together = last(halving_doubling(4), topology, 4e3)
    apart = last(halving_doubling(4), star(4, alpha=1e-3, overhead_s=1e-4), 4e3, shared_bytes=0)
    assert together == pytest.approx(4 * 1e-3 + 6e3 / 1e7, rel=0.01)
    assert apart > together


@pytest.mark.parametrize("schedule", [tree(4), halving_doubling(3)], ids=lambda s: s.name)
def test_an_order_worked_out_beforehand_is_faster(schedule):
    topology, size, segment = star(schedule.ranks), 8e6, 1 << 16
    segments = [-(-int(size / schedule.chunks) // segment)] * schedule.chunks
    orders = [order_messages(schedule, vertex, segments, 4) for vertex in range(schedule.ranks)]
    assert None not in orders
    ordered = last(schedule, topology, size, segment_bytes=segment, orders=orders)
    assert ordered < 0.95 * last(schedule, topology, size, segment_bytes=segment)


def test_what_is_too_much_is_refused():
    with pytest.raises(UsageError, match="over 1048576 messages: use simulate"):
        simulate_messages(ring(8), star(8), 1e9, segment_bytes=100)
    with pytest.raises(UsageError, match="ring is for 8 ranks"):
        simulate_messages(ring(8), star(7), 1e9)


# ------------------------------------------------------------------------------------------------ rounds as messages


@pytest.mark.parametrize(
    "schedule",
    [
        *(halving_doubling(n) for n in (1, 2, 3, 6, 8, 13, 16)),
        hierarchical(3, 4),
        hierarchical(4, 3, outer=two_tree),
        hierarchical(2, 6, outer=halving_doubling),
        hierarchical([2, 3], outer=ring),
        hierarchical(2, 3, outer=lambda n: by_name("in_network", n)),
        hierarchical(3, 4, inner=ring_reduce_scatter),
        hierarchical(1, 4),
        hierarchical(4, 1),
        hierarchical(4, 5, outer=lambda n: by_name("direct", n)),
        *(by_name(name, 7) for name in ALGORITHMS),
    ],
    ids=lambda s: f"{s.name}-{s.ranks}",
)
def test_messages_are_those_of_the_rounds(schedule):
    rounds = [part for stretch in stretches(schedule) for part in [stretch] * stretch.rounds]
    assert len(rounds) == schedule.rounds
    for k, stretch in enumerate(rounds):
        assert _by_pair(stretch.blocks()) == _by_pair([merged(schedule.round(k), schedule.vertices)])


def _by_pair(blocks):
    """Return (chunks, added) by (sender, receiver)."""
    columns = ((m.src, m.dst, m.chunks, m.added) for m in blocks)
    return {(a, b): (c, d) for arrays in columns for a, b, c, d in zip(*map(np.ndarray.tolist, arrays), strict=True)}


def test_a_round_of_many_ranks_comes_in_blocks(monkeypatch):
    whole = finish_seconds(by_name("direct", 12), star(12, overrides=(LinkOverride(0, 5, 1.0),)), [1e6])
    monkeypatch.setattr(messages_module, "BLOCK", 30)
    cut = finish_seconds(by_name("direct", 12), star(12, overrides=(LinkOverride(0, 5, 1.0),)), [1e6])
    assert cut == pytest.approx(whole)


def test_a_schedule_that_lists_too_much_says_what_to_do(monkeypatch):
    monkeypatch.setattr(messages_module, "MOST_TRANSFERS", 10)
    with pytest.raises(UsageError, match="topology, for which price"):
        finish_seconds(by_name("parameter_server", 16), star(16), [1e6])
    assert price(by_name("parameter_server", 16), star(16), 1e6) > 0
    with pytest.raises(UsageError, match="hierarchical among 5 ranks lists too many"):
        finish_seconds(hierarchical([2, 3]), star(5), [1e6])


def test_what_would_fill_memory_is_refused_before_it_does():
    with pytest.raises(UsageError, match="lists too many"):
        finish_seconds(by_name("hierarchical", 24_571), star(24_571), [1e6])

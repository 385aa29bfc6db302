"""Two engines and a reference: closed form, max-plus simulation, and one event after the other say the same."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.predict import (
    LinkClass,
    LinkOverride,
    Switch,
    Topology,
    closed_form,
    finish_seconds,
    preset,
    price,
    prices,
    simulate,
)
from ringside.predict.simulation.rounds import merged
from ringside.schedule import (
    ALGORITHMS,
    COLLECTIVES,
    by_name,
    from_rounds,
    hierarchical,
    in_network,
    pipelined,
    recursive_doubling,
    relabel,
    reverse,
    ring,
    ring_reduce_scatter,
    tree,
)
from ringside.schedule.schedule import Round, Schedule

from .event_simulation import finish_by_events
from .with_forms import FORMS

CLOSE = 1e-9
ALL = [*ALGORITHMS, *COLLECTIVES]

alphas = st.floats(0.0, 1e-3)
rates = st.floats(1e6, 1e12)
links = st.builds(LinkClass, st.just("nvlink"), alphas, rates, st.none() | rates)
wires = st.builds(LinkClass, st.just("ethernet"), alphas, rates)
switches = st.builds(Switch, alphas, rates)


@st.composite
def topologies(draw, even=False, most=24):
    """Return any topology of up to `most` ranks."""
    if even:
        per = draw(st.sampled_from([1, 2, 3, 4, 5, 8, most]))
        sizes = (per,) * draw(st.integers(1, max(1, most // per)))
    else:
        sizes = tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=8)))
    hosts, ranks = len(sizes), sum(sizes)
    rails = draw(st.sampled_from(["pooled", "own"]))
    overrides, host_rates = [], ()
    if not even:
        for of, count in (("ranks", ranks), ("hosts", hosts)):
            pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(lambda p: p[0] != p[1])
            chosen = draw(st.lists(pairs, max_size=4)) if count > 1 else []
            overrides += [LinkOverride(a, b, draw(st.none() | alphas), draw(st.none() | rates), of) for a, b in chosen]
        if hosts > 1 and draw(st.booleans()):
            host_rates = tuple((draw(rates), draw(rates)) for _ in sizes)
    return Topology(
        "any",
        sizes,
        draw(links),
        draw(wires),
        nics=draw(st.integers(1, 4)),
        rails=rails,
        oversubscription=draw(st.sampled_from([1.0, 2.0, 3.5])),
        hosts_per_leaf=draw(st.integers(1, 3)),
        nvls=draw(switches),
        sharp=draw(switches),
        reduce_bytes_per_s=draw(st.none() | rates),
        overhead_s=draw(st.just(0.0) | alphas),
        overrides=tuple(overrides),
        host_rates=host_rates,
    )


def check(schedule, topology, size, late=None):
    """Hold simulation and reference against each other."""
    timeline = simulate(schedule, topology, size, late=late)
    events = finish_by_events(schedule, topology, size, late)
    assert timeline.finish_seconds == pytest.approx(events, rel=CLOSE, abs=1e-15)
    at_once = finish_seconds(schedule, topology, [size], late=late)[0]  # whole stretches of rounds
    assert at_once == pytest.approx(events, rel=CLOSE, abs=1e-15)
    return timeline


@settings(max_examples=40, deadline=None)
@given(st.data(), topologies(), st.sampled_from(ALL), st.floats(0, 1e9))
def test_the_simulation_is_the_reference(data, topology, name, size):
    late = data.draw(st.dictionaries(st.integers(0, topology.ranks - 1), st.floats(0, 1e-2), max_size=3))
    timeline = check(by_name(name, topology.ranks), topology, size, late)
    path = timeline.critical_path
    assert sum(hop.end_s - hop.begin_s for hop in path) == pytest.approx(timeline.seconds, rel=1e-9, abs=1e-15)
    for a, b in itertools.pairwise(path):
        assert (a.dst, a.end_s) == (b.src, b.begin_s)


@settings(max_examples=25, deadline=None)
@given(topologies(most=12), st.sampled_from([*ALGORITHMS]), st.integers(2, 4), st.booleans(), st.randoms())
def test_combined_schedules_too(topology, name, segments, backwards, random):
    schedule = by_name(name, topology.ranks)
    order = list(range(topology.ranks))
    random.shuffle(order)
    schedule = pipelined(
        relabel(reverse(schedule) if backwards and not schedule.switches else schedule, order), segments
    )
    check(schedule, topology, 1e6)


@settings(max_examples=60, deadline=None)
@given(topologies(even=True), st.sampled_from([*FORMS, "ring_reduce_scatter", "direct_all_gather"]), st.floats(1, 1e9))
def test_closed_forms_are_the_simulation(topology, name, size):
    schedule = by_name(name, topology.ranks)
    found = closed_form(schedule, topology, [size, 2 * size])
    if found is not None:
        simulated = finish_seconds(schedule, topology, [size, 2 * size]).max(axis=1)
        assert found == pytest.approx(simulated, rel=CLOSE)


@settings(max_examples=25, deadline=None)
@given(topologies(even=True), st.sampled_from(list(FORMS)), st.booleans(), st.floats(1, 1e9))
def test_hierarchical_over_the_hosts(topology, outer, rings, size):
    local, hosts = topology.ranks_per_host[0], topology.hosts
    inner = {"inner": ring_reduce_scatter} if rings else {}
    schedule = hierarchical(local, hosts, outer=lambda n: by_name(outer, n), **inner)
    if schedule.switches and hosts == 1:
        return
    timeline = check(schedule, topology, size) if topology.ranks <= 12 else simulate(schedule, topology, size)
    found = closed_form(schedule, topology, [size])
    if found is not None:
        assert found[0] == pytest.approx(timeline.seconds, rel=CLOSE)


def test_every_algorithm_has_a_form_on_a_flat_network_of_a_power_of_two():
    two_levels = preset("dgx-h100", hosts=4)
    for name in ALGORITHMS:
        if name not in ("in_network", "hierarchical"):
            for hosts in (4, 16):
                flat = preset("ethernet-10g", hosts=hosts)
                assert closed_form(by_name(name, hosts), flat, [1e6]) is not None, (name, hosts)
        if name not in ("tree", "two_tree", "hierarchical"):
            assert closed_form(by_name(name, 32), two_levels, [1e6]) is not None, name
    assert closed_form(hierarchical(8, 4), two_levels, [1e6]) is not None


def _to_the_next_but_one(n, k):
    return Round.of([(0, 2 % n, -2 * k % n, True)])


@pytest.mark.parametrize("n", [5, 8, 9])
def test_stretches_of_rounds_in_any_direction(n):
    topology = Topology(
        "uneven",
        (1,) * n,
        between=LinkClass("ethernet", 1e-5, 1e9),
        reduce_bytes_per_s=1e9,
        overhead_s=1e-6,
        overrides=tuple(
            LinkOverride(a, (a + d) % n, 1e-5 * (1 + a % 3), 1e9 / (1 + a % 4)) for a in range(n) for d in (1, 2, n - 1)
        ),
    )
    check(ring(n), topology, 1e6, {1: 1e-3})
    check(reverse(ring(n)), topology, 1e6, {1: 1e-3})
    leaping = Schedule("leaping", n, n, 7, _to_the_next_but_one, (n,), rotational=True, stretches=(7,))
    check(leaping, topology, 1e6, {1: 1e-3})


def _rings_in_hosts(n):
    return hierarchical(2, n // 2, inner=ring_reduce_scatter)


@pytest.mark.parametrize("make", [*ALGORITHMS.values(), *COLLECTIVES.values(), _rings_in_hosts])
def test_what_a_schedule_says_of_its_stretches_is_so(make):
    for schedule in (make(6), reverse(make(6)) if make(6).collective.name != "all_to_all" else make(6)):
        first = 0
        for rounds in schedule.stretches:
            alike = {_who_sends_what(schedule, k) for k in range(first, first + rounds)}
            assert len(alike) == 1
            first += rounds
    with pytest.raises(UsageError, match="has 7 rounds, and its stretches 3"):
        Schedule("leaping", 5, 5, 7, _to_the_next_but_one, (5,), rotational=True, stretches=(3,))


def _who_sends_what(schedule, k):
    one = merged(schedule.round(k), schedule.vertices)
    return tuple(map(tuple, (one.src, one.dst, one.chunks, one.added)))


@pytest.mark.parametrize("name", ALL)
def test_64_ranks_of_every_preset_kind(name):
    schedule = by_name(name, 64)
    mixed = Topology(
        "mixed",
        (8, 16, 8, 32),
        LinkClass("pcie", 2e-6, 2e10, 5e10),
        LinkClass("roce", 5e-6, 1e10),
        nics=4,
        rails="own",
        oversubscription=2.0,
        hosts_per_leaf=2,
        sharp=Switch(1e-5, 1e10),
        reduce_bytes_per_s=1e10,
        overhead_s=1e-6,
        overrides=(LinkOverride(3, 4, 1e-4, 1e8), LinkOverride(0, 3, None, 1e9, "hosts")),
    )
    check(schedule, mixed, 1e7, {5: 1e-3})


# ------------------------------------------------------------------------------------------------ what is known


def flat(n, alpha=1e-5, rate=1e9, **more):
    return Topology("flat", (1,) * n, between=LinkClass("ethernet", alpha, rate), **more)


@pytest.mark.parametrize("n", [2, 3, 7, 16])
def test_the_textbook(n):
    alpha, beta, size = 1e-5, 1e-9, 1e7
    assert price(ring(n), flat(n), size) == pytest.approx(2 * (n - 1) * (alpha + size * beta / n))
    assert price(by_name("parameter_server", n), flat(n), size) == pytest.approx(2 * (alpha + (n - 1) * size * beta))
    assert price(by_name("chain", n), flat(n), size) == pytest.approx(2 * (n - 1) * (alpha + size * beta))
    if n == 16:
        assert price(recursive_doubling(n), flat(n), size) == pytest.approx(4 * (alpha + size * beta))
        halving = 8 * alpha + 2 * size * beta * (1 - 1 / n)
        assert price(by_name("halving_doubling", n), flat(n), size) == pytest.approx(halving)


def test_a_late_rank_of_5_ms_arrives_as_5_ms():
    late = simulate(ring(16), flat(16), 1e6, late={3: 5e-3})
    assert late.seconds - price(ring(16), flat(16), 1e6) == pytest.approx(5e-3, rel=1e-9)
    assert late.guilty.kind == "late rank"
    assert late.guilty.ranks == (3,)
    assert "5.00 ms" in str(late.guilty)
    hosts = preset("dgx-h100", hosts=16)
    more = simulate(ring(128), hosts, 1e9, late={77: 5e-3}).seconds - price(ring(128), hosts, 1e9)
    assert round(more * 1e3, 1) == 5.0


@pytest.mark.parametrize("n", [4, 16])
def test_a_link_4_times_slower_costs_exactly_what_it_must(n):
    alpha, beta, size = 1e-5, 1e-9, 1e7
    slow = flat(n).with_slow_link(1, 2, 4.0)
    rounds, chunk = 2 * (n - 1), size / n * beta
    # Its sender sends in every round; the last of these chunks goes on for as many hops as rounds are left, so the
    # path stays at the sender for all rounds but one, then crosses; or crosses, as often as a path meets the link.
    crossed = max(
        (rounds - hops) * 4 * chunk + met * (alpha + 4 * chunk) + (hops - met) * (alpha + chunk)
        for hops in range(1, rounds + 1)
        for met in range(1, -(-hops // n) + 1)
    )
    timeline = simulate(ring(n), slow, size)
    assert timeline.seconds == pytest.approx(crossed, rel=1e-9)
    assert timeline.guilty.kind == "slow link"
    assert timeline.guilty.ranks == (1, 2)
    assert timeline.guilty.seconds == pytest.approx(crossed - price(ring(n), flat(n), size), rel=0.2)


def test_network_latency_is_paid_once_per_host_and_round_trip_not_on_every_hop():
    hosts, local = 16, 8
    topology = preset("dgx-h100", hosts=hosts)
    inside, between = topology.inside.alpha_s, topology.between.alpha_s
    took = price(ring(hosts * local), topology, 0)
    rounds = 2 * (hosts * local - 1)
    crossings = -(-rounds // local)
    assert took == pytest.approx(crossings * between + (rounds - crossings) * inside)
    assert took < 0.7 * rounds * between


def test_ranks_that_share_an_interface_share_its_rate():
    one = Topology("x", (4, 4), LinkClass("pcie", 0, 1e12), LinkClass("roce", 0, 1e9), nics=1, rails="own")
    four = Topology("x", (4, 4), LinkClass("pcie", 0, 1e12), LinkClass("roce", 0, 1e9), nics=4, rails="own")
    schedule = from_rounds("across", 8, 1, [Round.of([(r, r + 4, 0, False) for r in range(4)])])
    assert price(schedule, one, 1e9) == pytest.approx(4.0)
    assert price(schedule, four, 1e9) == pytest.approx(1.0)


def test_oversubscription_and_leaves():
    between = LinkClass("roce", 0, 1e9)
    schedule = from_rounds("across", 4, 1, [Round.of([(0, 2, 0, False), (1, 3, 0, False)])])
    near = from_rounds("near", 4, 1, [Round.of([(0, 1, 0, False), (2, 3, 0, False)])])
    topology = Topology("x", (1,) * 4, between=between, oversubscription=4.0, hosts_per_leaf=2)
    assert price(schedule, topology, 1e9) == pytest.approx(4.0)
    assert price(near, topology, 1e9) == pytest.approx(1.0)


def test_a_switch_that_reduces():
    topology = preset("dgx-h100", hosts=1)
    size = 1e9
    took = price(by_name("in_network", 8), topology, size)
    assert took == pytest.approx(2 * (topology.nvls.alpha_s + size / topology.nvls.bytes_per_s))
    streamed = price(by_name("in_network", 8), topology, size, segments=64)
    assert 0.5 * took < streamed < 0.6 * took  # every round of every segment waits for its latency
    with pytest.raises(UsageError, match=r"no switch between its hosts that reduces.*\[sharp\]"):
        price(by_name("in_network", 4), preset("ethernet-10g"), 1e6)


@pytest.mark.parametrize("outer", [ring, in_network])
@pytest.mark.parametrize("segments", [1, 3])
def test_hosts_pipelined_with_a_switch_between_them_and_without(outer, segments):
    topology = preset("dgx-h100", hosts=3, ranks_per_host=4)
    check(pipelined(hierarchical(4, 3, outer=outer), segments), topology, 1e8, late={5: 1e-4})


@pytest.mark.parametrize("other", [pipelined(hierarchical(4, 2), 2), reverse(hierarchical(4, 2))])
def test_hosts_in_segments_or_reversed_have_no_closed_form_and_are_played(other):
    topology = preset("dgx-h100", hosts=2, ranks_per_host=4)
    assert closed_form(other, topology, [1e6]) is None


def test_a_host_with_a_rail_less_is_named_where_it_decides():
    topology = preset("dgx-h100", hosts=3)
    found = simulate(hierarchical(8, 3), topology.without_rail(1).without_rail(1), 1e9)
    assert found.guilty[:2] == ("narrow host", (1,))
    usual = simulate(hierarchical(8, 3), topology, 1e9)
    assert found.guilty.seconds == pytest.approx(found.seconds - usual.seconds, rel=0.05)


def test_a_slow_link_that_has_more_than_its_share_left_is_not_guilty():
    """Eight ranks share eight interfaces: a link that carries a quarter of all eight carries twice its share."""
    topology = preset("dgx-h100", hosts=2)
    usual, slow = (simulate(hierarchical(8, 2), one, 1e9) for one in (topology, topology.with_slow_link(0, 8, 4.0)))
    assert slow.seconds == usual.seconds
    assert slow.guilty.kind == "nobody"


def test_pipelining_makes_trees_worth_it():
    topology = flat(16)
    whole, cut = price(tree(16), topology, 1e8), price(tree(16), topology, 1e8, segments=64)
    assert cut < 0.5 * whole
    check(pipelined(tree(16), 8), topology, 1e8)


# ------------------------------------------------------------------------------------------------ what comes out


def test_arrays():
    timeline = simulate(ring(6), flat(6), 6e6)
    assert timeline.finish_seconds.shape == (6,)
    assert timeline.finish_seconds.dtype == np.float64
    assert timeline.checkpoints.shape == (11, 6)
    assert timeline.ready_for(10) == pytest.approx(timeline.finish_seconds)
    sent = list(timeline.sent())
    assert len(sent) == 10
    assert sent[3].round == 3
    assert (sent[3].size_bytes == 1e6).all()
    assert sent[3].arrive_s == pytest.approx(sent[3].leave_s + 1e-5)
    assert max(s.arrive_s.max() for s in sent) == pytest.approx(timeline.seconds)
    assert timeline.busbw == pytest.approx(6e6 / timeline.seconds * 10 / 6)
    assert finish_seconds(ring(6), flat(6), [1e6, 6e6])[1] == pytest.approx(timeline.finish_seconds)
    assert prices(ring(6), flat(6), [6e6, 0]) == pytest.approx([timeline.seconds, 10e-5])


@pytest.mark.parametrize("name", ["ring", "tree", "direct", "halving_doubling", "parameter_server"])
@pytest.mark.parametrize("segments", [1, 3])
def test_several_sizes_at_once_are_each_of_them_by_itself_to_the_last_bit(name, segments, monkeypatch):
    sizes, topology = [0.0, 1.0, 7e5, 3e9], flat(6, overhead_s=1e-6, reduce_bytes_per_s=3e9).with_slow_link(1, 2, 3.0)
    late = {4: 1e-5}
    together = finish_seconds(by_name(name, 6), topology, sizes, late=late, segments=segments)
    monkeypatch.setattr("ringside.predict.simulation.simulate.MOST_PLAYED", 1)
    alone = finish_seconds(by_name(name, 6), topology, sizes, late=late, segments=segments)
    for size, row, own in zip(sizes, together, alone, strict=True):
        played = simulate(by_name(name, 6), topology, size, late=late, segments=segments)
        assert row.tolist() == own.tolist()
        assert row == pytest.approx(played.finish_seconds, rel=1e-12)
    assert finish_seconds(by_name(name, 6), topology, []).shape == (0, 6)


def test_what_is_not_kept_is_played_again(monkeypatch):
    topology = flat(9).with_slow_link(4, 5, 3.0)
    whole = simulate(ring(9), topology, 1e6, late={2: 1e-4})
    monkeypatch.setattr("ringside.predict.simulation.timeline.KEPT", 10)
    some = simulate(ring(9), topology, 1e6, late={2: 1e-4})
    assert some.every > 1
    assert some.every == 4
    for k in range(17):
        assert some.ready_for(k) == pytest.approx(whole.ready_for(k), rel=1e-12)
    assert [hop[:4] for hop in some.critical_path] == [hop[:4] for hop in whole.critical_path]
    for one, other in zip(some.sent(5, 7), whole.sent(5, 7), strict=True):
        assert one.arrive_s == pytest.approx(other.arrive_s)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: price(ring(4), flat(5), 1e6), "ring is for 4 ranks, and 'flat' has 5"),
        (lambda: price(ring(4), flat(4), -1), "0 bytes or more, not -1"),
        (lambda: price(ring(4), flat(4), float("nan")), "0 bytes or more"),
        (lambda: simulate(ring(4), flat(4), 1, late={4: 1.0}), "rank 4 cannot be late: ranks are 0 to 3"),
        (lambda: simulate(ring(4), flat(4), 1, late={1: -1.0}), "rank 1 is late by 0 seconds or more"),
        (lambda: simulate(ring(4), flat(4), 1, segments=0), "at least 1 segment"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_extremes():
    assert price(ring(1), Topology("alone", (1,)), 1e15) == 0.0
    assert simulate(ring(1), Topology("alone", (1,)), 0).critical_path == ()
    assert price(ring(4), flat(4), 0) == pytest.approx(6e-5)
    assert price(ring(4), flat(4), 1e15) == pytest.approx(1.5e6, rel=1e-6)
    assert simulate(ring(2), flat(2, alpha=0.0), 0).guilty.kind == "nobody"


def test_a_switch_is_on_no_host_whose_rails_could_be_lost():
    """A message to a switch between hosts ends at no host; it may be what decides."""
    topology = preset("dgx-a100", 4).without_rail(2)
    timeline = simulate(hierarchical(8, 4, outer=in_network), topology, 1e9)
    assert any(hop.peer >= topology.ranks or hop.src >= topology.ranks for hop in timeline.critical_path)
    assert {one.kind for one in timeline.blamed} <= {"narrow host", "nobody"}


def test_where_a_part_has_no_form_hierarchical_has_none():
    """A tree of three is not full."""
    topology = preset("dgx-h100", 3)
    assert closed_form(hierarchical(8, 3, outer=tree), topology, [1e6]) is None
    assert closed_form(hierarchical(8, 3, outer=ring), topology, [1e6]) is not None

from __future__ import annotations

import itertools
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
from tests.support.networks import uniform

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.cost.network import CostNetwork
from ringside.engine.net.exchange.exchange import HopTiming
from ringside.engine.probe.links import (
    best_ring_order,
    carried_together,
    links_beside,
    median_beside,
    plainly_slow,
    round_robin,
    slow_links,
    slowest_of_ring,
    suspect_links,
)
from ringside.engine.probe.prober import Effort, Probe, Prober, arrival_rate, measure_cluster, remeasure_slow_links
from ringside.engine.probe.reachability import answering, own_address, unreachable
from ringside.engine.topology import usable_cores

from .threaded import on_threads

EFFORT = Effort(pings=3, bulk_s=0.001, repeats=2, most_bytes=1 << 20)


def rates_of(n: int, *slow: tuple[int, int, float]) -> np.ndarray:
    rates = np.full((n, n), 100.0)
    for a, b, share in slow:
        rates[a, b] *= share
    np.fill_diagonal(rates, 0)
    return rates


@pytest.mark.parametrize("n", range(9))
def test_in_a_tournament_every_two_meet_once_and_nobody_twice_in_a_turn(n: int):
    turns = round_robin(n)
    assert sorted(pair for turn in turns for pair in turn) == list(itertools.combinations(range(n), 2))
    assert len(turns) == (0 if n < 2 else n - 1 + n % 2)
    for turn in turns:
        seen = [v for pair in turn for v in pair]
        assert len(seen) == len(set(seen))


def test_a_slow_link_is_named_and_half_is_not_slow():
    assert slow_links(rates_of(4)) == []
    assert slow_links(rates_of(4, (0, 1, 0.5))) == []
    (found,) = slow_links(rates_of(4, (2, 1, 0.25)))
    assert (found.src, found.dst, found.share, found.usual) == (2, 1, 0.25, 100.0)
    both = slow_links(rates_of(4, (2, 1, 0.25), (1, 2, 0.2)))
    assert [(link.src, link.dst) for link in both] == [(1, 2), (2, 1)]
    assert [(link.src, link.dst) for link in slow_links(rates_of(2, (0, 1, 0.3)))] == [(0, 1)]


def test_of_three_vertices_the_reverse_of_a_link_is_not_beside_it():
    rates = np.array([[0.0, 60.0, 100.0], [30.0, 0.0, 200.0], [100.0, 200.0, 0.0]])
    assert median_beside(rates, (0, 1)) == 150.0
    assert median_beside(rates[:2, :2], (0, 1)) == 30.0


def test_what_enters_a_vertex_is_between_its_fastest_link_and_all_of_its_links():
    rates = np.array([[0.0, 30.0, 50.0], [10.0, 0.0, 40.0], [20.0, 35.0, 0.0]])
    assert carried_together(np.array([5.0, 50.0, 95.0]), rates).tolist() == [20.0, 50.0, 90.0]


def test_a_vertex_all_of_whose_links_are_slow_is_named_once():
    slow = [(3, v, 0.1) for v in range(3)] + [(v, 3, 0.1) for v in range(3)]
    (found,) = slow_links(rates_of(6, *slow, (3, 4, 0.1), (4, 3, 0.1), (3, 5, 0.1), (5, 3, 0.1)))
    assert (found.src, found.dst) == (3, -1)
    assert found.share == pytest.approx(0.1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_the_best_ring_of_a_few_is_exact(n: int):
    rng = np.random.default_rng(n)
    for _ in range(5):
        rates = rng.uniform(10, 100, (n, n))
        order = best_ring_order(rates)
        assert sorted(order) == list(range(n))
        assert order[0] == 0
        best = max(slowest_of_ring(rates, (0, *rest)) for rest in itertools.permutations(range(1, n)))
        assert slowest_of_ring(rates, order) == best


def test_the_best_ring_of_many_avoids_slow_links():
    n = 12
    slow = [(v, (v + 1) % n, 0.1) for v in range(0, n, 3)]
    rates = rates_of(n, *slow, *((b, a, share) for a, b, share in slow))
    order = best_ring_order(rates)
    assert sorted(order) == list(range(n))
    assert slowest_of_ring(rates, range(n)) == 10.0
    assert slowest_of_ring(rates, order) == 100.0


def test_a_doubted_link_is_held_against_those_that_share_its_ends():
    assert links_beside((0, 1), [(0, 1), (1, 0)], 4) == [(2, 1), (0, 2)]
    whole = [(3, v) for v in range(3)] + [(v, 3) for v in range(3)]  # vertex 3 is slow, whatever it does
    assert links_beside((3, 0), whole, 4) == [(1, 0)]
    assert links_beside((0, 1), [(0, 1)], 2) == [(1, 0)]
    assert links_beside((0, 1), [(0, 1), (1, 0)], 2) == []
    assert suspect_links(rates_of(4, (0, 1, 0.4), (2, 3, 0.6))) == [(0, 1)]


def busy(rng: np.random.Generator, count: int, rate: float) -> list[float]:
    """Timings on a machine that is busy: most are near the rate, every third a half to a tenth of it."""
    found = rate * rng.lognormal(-0.1, 0.1, count)
    found[rng.random(count) < 1 / 3] *= rng.uniform(0.1, 0.5)
    return found.tolist()


def test_a_link_is_called_slow_by_more_than_its_timings_scatter():
    rng = np.random.default_rng(3)
    once = [slow_links(rates_of(4, (0, 1, np.percentile(busy(rng, 1, 1.0), 75)))) != [] for _ in range(2000)]
    well = [plainly_slow(busy(rng, 8, 100.0), busy(rng, 16, 100.0)) for _ in range(2000)]
    cut = [plainly_slow(busy(rng, 8, 25.0), busy(rng, 16, 100.0)) for _ in range(2000)]
    assert sum(once) > 300  # by a single timing it often is
    assert sum(well) <= 2
    assert sum(cut) >= 1800
    assert plainly_slow([1.0], [])


class Recorded(Prober):
    """Bulks of its own are as fast as the list for that link says, in turn."""

    timings: dict[tuple[int, int], list[float]]

    def bulk_rate(self, link, known):
        super().bulk_rate(link, known)
        again = self.timings.get(link, [100e6])
        return again.pop(0) if self._me == link[1] and len(again) > 1 else again[0] * (self._me == link[1])


def looked_again(across, first, timings, clock=None):
    """Return the rates to go by, and how often links were timed again, where a probe saw the first ones."""
    prober = Recorded(across, effort=replace(EFFORT, again_s=0.5), **({"clock": clock} if clock else {}))
    prober.timings = {link: list(rates) for link, rates in timings.items()}
    calls = []
    real = prober.bulk_rate
    prober.bulk_rate = lambda link, known: calls.append(link) or real(link, known)
    return remeasure_slow_links(prober, first, np.full_like(first, 100e6)), calls


def test_only_links_that_are_plainly_slow_stay_so():
    first = 1e6 * rates_of(4, (0, 1, 0.25), (2, 3, 0.2))
    timings = {(0, 1): [25e6, 26e6, 24e6] * 9, (2, 3): [90e6, 20e6, 95e6] * 9}
    found = on_threads(4, lambda across: looked_again(across, first, timings))
    for sure, calls in found:
        assert sure.tobytes() == found[0][0].tobytes()
        assert [(link.src, link.dst) for link in slow_links(sure)] == [(0, 1)]
        assert calls.count((0, 1)) == calls.count((2, 3)) == EFFORT.again
        assert {(2, 1), (0, 2), (0, 3), (2, 0)} <= set(calls)
    assert not on_threads(3, lambda across: looked_again(across, 1e6 * rates_of(3), {}))[0][1]


def test_links_are_timed_again_a_few_times_even_where_that_takes_long():
    first = 1e6 * rates_of(4, (0, 1, 0.25))

    def job(across):
        now = itertools.count()  # a second between one look at the clock and the next
        return looked_again(across, first, {(0, 1): [25e6]}, lambda: float(next(now)))

    for sure, calls in on_threads(4, job):
        assert calls.count((0, 1)) == 3
        assert [(link.src, link.dst) for link in slow_links(sure)] == [(0, 1)]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_ranks_end_with_the_same_matrix(n: int):
    probes: list[Probe] = on_threads(n, lambda across: Prober(across, effort=EFFORT).probe())
    off = ~np.eye(n, dtype=bool)
    for probe in probes:
        for name in ("latency_s", "seconds_per_byte"):
            assert getattr(probe.network, name).tobytes() == getattr(probes[0].network, name).tobytes()
        assert probe.upper.tobytes() == probes[0].upper.tobytes()
        assert (probe.rates[off] > 0).all()
        assert (probe.network.latency_s[off] > 0).all()
        assert probe.network.reduce == probes[0].network.reduce > 0
    assert (probes[0].network.out is not None) == (n > 2)


def test_a_thorough_probe_times_links_alone_and_only_some_ranks_may_be_vertices():
    effort = Effort(pings=3, bulk_s=0.001, repeats=2, most_bytes=1 << 20, alone=True)
    probes = on_threads(4, lambda across: Prober(across, (1, 3), effort).probe())
    assert [probe.network.size for probe in probes] == [2] * 4
    assert probes[0].network.size == 2
    assert probes[0].alone is not None
    assert (probes[0].rates >= probes[0].network.rates).all()
    assert {probe.alone.tobytes() for probe in probes} == {probes[0].alone.tobytes()}


def test_a_links_rate_is_the_upper_quartile_of_its_bulks_and_its_spread_is_known():
    bulks = {(0, 1): [50e6, 10e6, 40e6, 20e6, 30e6, 60e6, 25e6], (1, 0): [80e6, 81e6, 82e6, 83e6, 84e6, 85e6, 86e6]}

    def job(across) -> Probe:
        inner, hops, left = across.run, across.exchange.hops, {link: list(rates) for link, rates in bulks.items()}

        def run(*args, **more):
            known = len(hops)
            inner(*args, **more)
            for place in range(known, len(hops)):  # as if the wire had taken so long
                hop, segment = hops[place], across.exchange.segment_bytes
                rates = left[hop.src, across.rank_map.rank]
                rate = rates.pop(0) if hop.size_bytes > 2 * segment else 70e6  # that much is a first idea
                if hop.size_bytes > segment:
                    hops[place] = hop._replace(last=hop.first + (hop.size_bytes - segment) / rate)

        across.run = run
        return Prober(across, effort=replace(EFFORT, pings=30, repeats=7, again=0)).probe()

    for probe in on_threads(2, job):
        for link, rates in bulks.items():
            tenth, middle, upper, ninetieth = np.percentile(rates, (10, 50, 75, 90))
            assert probe.upper[link] == pytest.approx(upper)
            assert probe.rate_spread[link] == pytest.approx((ninetieth - tenth) / middle)


def test_a_probe_stops_refining_when_rank_0s_time_is_over():
    def job(across, budget_s: float) -> tuple[Probe, int]:
        runs = []
        inner = across.run
        across.run = lambda *args, **more: (runs.append(1), inner(*args, **more))[1]
        clock = itertools.count(0.0, 1.0 if across.rank_map.rank == 0 else 0.0)  # only rank 0's goes on
        prober = Prober(across, effort=replace(EFFORT, budget_s=budget_s, again=0), clock=lambda: float(next(clock)))
        return prober.probe(), len(runs)

    short = on_threads(4, lambda across: job(across, 0.5))
    whole = on_threads(4, lambda across: job(across, 1e9))
    assert {count for _, count in short} == {3 * 3 + 2}  # first looks and the flood
    assert {count for _, count in whole} == {3 * 3 + 2 + 2 * 3 * EFFORT.repeats}
    off = ~np.eye(4, dtype=bool)
    for probe, _ in short:
        assert (probe.rates[off] > 0).all()
        assert (probe.network.latency_s[off] > 0).all()


def test_what_arrives_together_is_one_rate():
    hops = [
        HopTiming(1, 0, 1, 300, 0.0, 1.0, 5.0),
        HopTiming(1, 0, 2, 300, 5.0, 5.0, 5.0),
        HopTiming(1, 0, 3, 300, 5.0, 5.0, 9.0),
    ]
    assert arrival_rate(hops, 100) == pytest.approx(100.0)
    assert arrival_rate([], 100) == 0.0


def test_the_cluster_knows_who_shares_cores():
    of = on_threads(3, lambda across: measure_cluster(Prober(across), uniform(3, 1e-4, 1e-8)))[0]
    assert of.machines == (0, 0, 0)
    assert 0 < of.inside[0] < 1e-4  # within a host a message takes less than between them
    assert of.cores == (usable_cores(),) * 3
    assert of.wire_share == 1.0


def test_choices_are_timed_alike_on_all_ranks():
    times = on_threads(3, lambda across: Prober(across).time_choice(AlgorithmSpec("ring"), 4096, 4))
    assert times[0] == times[1] == times[2]
    assert len(times[0]) == 4
    assert min(times[0]) > 0


def test_a_probe_is_fine_or_knows_a_better_order():
    def probe(rates: np.ndarray) -> Probe:
        with np.errstate(divide="ignore"):
            per_byte = np.where(rates > 0, 1 / rates, 0.0)
        network = CostNetwork(np.full(rates.shape, 1e-4), per_byte)
        return Probe(network, rates, np.zeros(rates.shape))

    assert not probe(rates_of(4)).slow
    assert probe(rates_of(4)).better_order == ()
    bad = probe(rates_of(4, (0, 1, 0.25), (1, 0, 0.25)))
    assert bad.slow
    order = bad.better_order
    steps = set(zip(order, (*order[1:], order[0]), strict=True))
    assert steps.isdisjoint({(0, 1), (1, 0)})


def test_who_answers_is_reachable_and_who_does_not_is_named_in_time():
    with answering("127.0.0.1") as listens, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody listens there
        silent = socket.create_server(("127.0.0.1", 0))  # accepts, and says nothing
        with silent:
            peers = {3: listens, 5: deaf.getsockname(), 7: silent.getsockname()}
            assert unreachable(peers, 0.3) == [5, 7]
    assert unreachable({}, 0.1) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ringside-listener")]


def test_the_own_address_is_that_of_the_interface_or_of_the_way_to_rank_0():
    assert own_address("127.0.0.1", 1, {}) == "127.0.0.1"
    assert own_address("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"
    assert own_address("127.0.0.1", 1, {"GLOO_SOCKET_IFNAME": "no-such-interface"}) == "127.0.0.1"

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.support.networks import uniform

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.cost.model import SEGMENT_BYTES, Cluster, Price, places, price_choice, price_sizes
from ringside.engine.cost.network import CostNetwork
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, Schedule, by_name, pipelined, relabel, ring, traffic

ALPHA, BETA, MB = 1e-4, 1 / 118e6, 1 << 20
WHOLE = 1 << 60  # segments so large that a chunk is never cut


def price(schedule: Schedule, size: float, network: CostNetwork, *, segment_bytes: int = SEGMENT_BYTES) -> Price:
    return price_sizes(schedule, [size], network, segment_bytes=segment_bytes)[0]


def slow_link(n: int, a: int, b: int, factor: float) -> CostNetwork:
    network = uniform(n, ALPHA, BETA)
    per_byte = network.seconds_per_byte.copy()
    per_byte[a, b] = per_byte[b, a] = factor * BETA
    return CostNetwork(network.latency_s, per_byte)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 16, 64])
@pytest.mark.parametrize("size", [0, 4096, 16 << 20])
def test_a_ring_takes_what_its_formula_says(n: int, size: int):
    found = price(ring(n), size, uniform(n, ALPHA, BETA, shared=True), segment_bytes=WHOLE)
    assert found.seconds == pytest.approx(2 * (n - 1) * (ALPHA + size / n * BETA))
    assert found.latency_s == pytest.approx(2 * (n - 1) * ALPHA)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "in_network"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_no_schedule_beats_its_busiest_vertex_and_latency_is_rounds(name: str, n: int):
    schedule = by_name(name, n)
    size = 8 << 20
    found = price(schedule, size, uniform(n, ALPHA, BETA, shared=True))
    moved = traffic(schedule)
    assert found.seconds >= float(max(moved.max_bytes_sent, moved.max_bytes_received)) * size * BETA * (1 - 1e-9)
    assert found.latency_s <= schedule.rounds * ALPHA * (1 + 1e-9)


@pytest.mark.parametrize("n", [3, 4, 8])
def test_symmetry_gives_what_the_whole_schedule_gives(n: int):
    even = uniform(n, ALPHA, BETA, shared=True, reduce=1e-10, overhead_s=2e-5)
    for make in ("ring", "direct"):
        schedule = by_name(make, n)
        assert schedule.rotational
        whole = relabel(schedule, range(n))
        assert not whole.rotational
        for size in (1000, 1 << 20, 16 << 20):
            assert price(schedule, size, even).seconds == pytest.approx(price(whole, size, even).seconds)


def test_a_large_ring_is_priced_by_symmetry():
    found = price(ring(512), 1 << 30, uniform(512, ALPHA, BETA), segment_bytes=WHOLE)
    assert found.seconds == pytest.approx(2 * 511 * (ALPHA + (1 << 30) / 512 * BETA))


def test_a_shared_interface_makes_the_parameter_server_linear():
    times = {n: price(by_name("parameter_server", n), 1 << 20, uniform(n, 0, BETA, shared=True)) for n in (4, 8)}
    for n, found in times.items():
        assert found.seconds > (n - 1) * (1 << 20) * BETA
    alone = price(by_name("parameter_server", 8), 1 << 20, uniform(8, 0, BETA), segment_bytes=WHOLE)
    assert alone.seconds == pytest.approx(2 * (1 << 20) * BETA)


def test_pipelining_a_chain_pays_for_large_tensors_only():
    network = uniform(6, ALPHA, BETA)
    plain, cut = by_name("chain", 6), pipelined(by_name("chain", 6), 16)
    large, small = 16 << 20, 256
    assert (
        price(cut, large, network, segment_bytes=WHOLE).seconds
        < 0.4 * price(plain, large, network, segment_bytes=WHOLE).seconds
    )
    assert price(cut, small, network).seconds >= price(plain, small, network).seconds
    # The transport cuts chunks into segments by itself, so a plain chain is not as slow as its chunks suggest.
    assert price(plain, large, network).seconds < 0.5 * price(plain, large, network, segment_bytes=WHOLE).seconds


def test_a_slow_link_is_what_dominates_and_another_order_goes_round_it():
    network = slow_link(4, 0, 1, 4.0)
    plain = price(ring(4), 8 << 20, network)
    assert plain.link == (0, 1)
    assert plain.seconds == pytest.approx(4 * price(ring(4), 8 << 20, uniform(4, ALPHA, BETA)).seconds, rel=0.1)
    around = price(relabel(ring(4), (0, 2, 1, 3)), 8 << 20, network)
    assert around.seconds < 0.3 * plain.seconds
    assert "link 0>1" in plain.why()
    assert "latency" in price(ring(4), 64, network).why()


def test_reduction_and_messages_cost():
    free = price(ring(4), 8 << 20, uniform(4, ALPHA, BETA)).seconds
    assert price(ring(4), 8 << 20, uniform(4, ALPHA, BETA, reduce=4 * BETA)).seconds > 1.5 * free
    small = price(ring(4), 64, uniform(4, ALPHA, BETA, overhead_s=ALPHA)).seconds
    assert small == pytest.approx(3 * price(ring(4), 64, uniform(4, ALPHA, BETA)).seconds, rel=0.01)


def test_several_sizes_at_once_are_the_same_as_one_by_one():
    network, sizes = slow_link(5, 1, 3, 3.0), [1, 1000, 1 << 20, 1 << 26]
    together = price_sizes(by_name("two_tree", 5), sizes, network)
    assert together == [price(by_name("two_tree", 5), size, network) for size in sizes]


def test_one_rank_and_wrong_networks():
    assert price(ring(1), 100, uniform(1, ALPHA, BETA)).seconds == 0.0
    with pytest.raises(UsageError, match="cannot be priced on a network of 5"):
        price(ring(4), 100, uniform(5, ALPHA, BETA))
    with pytest.raises(UsageError, match="cannot be priced"):
        price(by_name("in_network", 4), 100, uniform(4, ALPHA, BETA))
    with pytest.raises(UsageError, match="do not fit"):
        CostNetwork(np.zeros((3, 3)), np.zeros((2, 2)))
    with pytest.raises(UsageError, match="finite"):
        CostNetwork(np.full((2, 2), np.nan), np.zeros((2, 2)))


def cluster(hosts: int, ranks: int, **more: object) -> Cluster:
    between = uniform(hosts, ALPHA, BETA, shared=True)
    return Cluster(between, tuple(tuple(range(h * ranks, (h + 1) * ranks)) for h in range(hosts)), **more)  # type: ignore[arg-type]


def test_over_hosts_carries_each_byte_once_and_over_ranks_shares_the_interface():
    pair = cluster(4, 2, local_seconds_per_byte=1e-10)
    (over_hosts,) = price_choice(AlgorithmSpec.parse("hosts/ring"), [16 << 20], pair)
    (over_ranks,) = price_choice(AlgorithmSpec.parse("ring"), [16 << 20], pair)
    (direct,) = price_choice(AlgorithmSpec.parse("direct"), [16 << 20], pair)
    ideal = 2 * 3 / 4 * (16 << 20) * BETA
    assert ideal < over_hosts.seconds < 1.15 * ideal
    assert 1.1 * ideal < over_ranks.seconds < 1.4 * ideal  # 2*7/8 of the bytes leave each host
    assert direct.seconds > 1.8 * ideal  # both ranks of a host send to all six elsewhere


def test_shared_memory_hides_behind_the_links_but_for_a_piece():
    sizes = [64 << 10, 32 << 20]
    free = price_choice(AlgorithmSpec.parse("hosts/ring"), sizes, cluster(4, 2))
    slow = price_choice(AlgorithmSpec.parse("hosts/ring"), sizes, cluster(4, 2, local_seconds_per_byte=0.5 * BETA))
    assert slow[0].seconds == pytest.approx(free[0].seconds + 0.5 * BETA * sizes[0])
    assert slow[1].seconds == pytest.approx(free[1].seconds + 0.5 * BETA * (2 << 20))


def test_where_shared_memory_is_slower_than_the_links_it_is_what_a_large_tensor_waits_for():
    size, per_byte = 32 << 20, 10 * BETA
    (found,) = price_choice(AlgorithmSpec.parse("hosts/ring"), [size], cluster(4, 2, local_seconds_per_byte=per_byte))
    assert found.seconds == pytest.approx(per_byte * (size + (2 << 20)))


@pytest.mark.parametrize(("segments", "shown"), [(3, 3), (4, 2)])
def test_shared_memory_hides_from_two_segments_of_every_lane_on(segments: int, shown: int):
    def seconds(local: float) -> float:
        of = cluster(4, 2, local_seconds_per_byte=local)
        return price_choice(AlgorithmSpec.parse("hosts/ring"), [segments * SEGMENT_BYTES], of)[0].seconds

    assert seconds(0.5 * BETA) - seconds(0.0) == pytest.approx(0.5 * BETA * shown * SEGMENT_BYTES)


@pytest.mark.parametrize("local", [0.1 * BETA, 10 * BETA])
def test_native_over_hosts_goes_in_blocks_of_which_one_is_added_up_while_another_travels(local: float):
    block, blocks = 1 << 20, 8
    of = cluster(4, 2, local_seconds_per_byte=local, block_bytes=block)
    found = price_choice(AlgorithmSpec.parse("hosts/native"), [block, blocks * block], of)
    inside = local * block
    between = found[0].seconds - inside
    assert found[1].seconds == pytest.approx(inside + between + (blocks - 1) * max(inside, between))


def test_a_narrow_wire_halves_our_bytes_and_not_natives():
    whole, half = cluster(4, 2), cluster(4, 2, wire_share=0.5)
    for name in ("hosts/ring", "leaders/two_tree", "ring", "direct"):
        wide, narrow = (price_choice(AlgorithmSpec.parse(name), [32 << 20], of)[0].seconds for of in (whole, half))
        assert narrow == pytest.approx(0.5 * wide, rel=0.05)
        assert price_choice(AlgorithmSpec.parse(name), [4], half)[0].seconds == pytest.approx(
            price_choice(AlgorithmSpec.parse(name), [4], whole)[0].seconds, rel=0.01
        )
    for name in ("native", "hosts/native"):
        assert price_choice(AlgorithmSpec.parse(name), [MB], half) == price_choice(
            AlgorithmSpec.parse(name), [MB], whole
        )


def test_adding_up_is_of_whole_elements_however_they_travel():
    def seconds(share: float) -> float:
        between = uniform(4, 0.0, 0.0, reduce=1e-9)
        of = Cluster(between, ((0,), (1,), (2,), (3,)), wire_share=share)
        return price_choice(AlgorithmSpec("ring"), [4 * MB], of)[0].seconds

    assert seconds(0.5) == pytest.approx(seconds(1.0), rel=0.2)


def test_where_ranks_outnumber_cores_fewer_talkers_are_cheaper():
    few, enough = cluster(4, 2, machines=(0,) * 4, cores=(2,) * 4), cluster(4, 2, machines=(0, 1, 2, 3), cores=(2,) * 4)
    assert [few.crowding(over) for over in ("ranks", "hosts", "leaders")] == [4.0, 4.0, 2.0]
    assert [enough.crowding(over) for over in ("ranks", "hosts", "leaders")] == [1.0] * 3
    assert cluster(4, 2).crowding("ranks") == 1.0

    def seconds(name: str, of: Cluster) -> float:
        return price_choice(AlgorithmSpec.parse(name), [4096], of)[0].seconds

    for name in ("one_shot", "recursive_doubling", "direct"):
        assert seconds(f"leaders/{name}", few) < seconds(f"hosts/{name}", few)
        assert seconds(f"leaders/{name}", enough) >= seconds(f"hosts/{name}", enough)
        assert seconds(f"leaders/{name}", few) == seconds(f"leaders/{name}", enough)  # they were timed by leaders


def test_an_even_network_knows_it():
    assert uniform(4, ALPHA, BETA, shared=True).even
    assert not slow_link(4, 0, 1, 2.0).even
    assert not uniform(2, ALPHA, BETA).expanded([(0, 1), (2, 3)], 1e-6, 1e-10).even


def test_the_topology_file_and_back():
    network = CostNetwork(
        slow_link(3, 0, 2, 4.0).latency_s, slow_link(3, 0, 2, 4.0).seconds_per_byte, np.full(3, BETA), None, 1e-10, 2e-5
    )
    data = json.loads(json.dumps(network.to_topology(["a", "b", "c"], [2, 2, 1], "a test")))
    assert data["hosts"][2] == {"name": "c", "ranks": 1, "out_bytes_per_s": pytest.approx(118e6)}
    assert data["links"][1]["bytes_per_s"] == pytest.approx(118e6 / 4)
    again = CostNetwork.from_topology(data)
    off = ~np.eye(3, dtype=bool)
    assert np.allclose(again.seconds_per_byte[off], network.seconds_per_byte[off])
    assert np.allclose(again.latency_s[off], ALPHA)
    assert np.allclose(again.out, BETA)
    assert (again.into, again.reduce, again.overhead_s) == (None, pytest.approx(1e-10), 2e-5)


@pytest.mark.parametrize(
    "data",
    [
        None,
        {},
        {"schema": 2, "kind": "ringside topology"},
        {"schema": 1, "kind": "ringside topology", "hosts": [{}, {}], "links": []},
        {"schema": 1, "kind": "ringside topology", "hosts": [{}], "links": [{"src": 0, "dst": 4, "alpha_s": 1}]},
    ],
)
def test_what_is_no_topology_is_refused(data: object):
    with pytest.raises(UsageError):
        CostNetwork.from_topology(data)


def test_messages_on_one_link_follow_each_other_in_their_order():
    assert places(np.array([5, 3, 5, 5, 3, 9])).tolist() == [0, 0, 1, 2, 1, 0]
    assert places(np.array([], dtype=np.int64)).tolist() == []

"""What long links have on their way, and how all ranks come to it in the middle of their collectives."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.networks import uniform
from tests.support.thread_transport import Switchboard, Threads, each_on_a_thread

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import DTYPES
from ringside.engine.net.exchange import in_flight as limits
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.in_flight import (
    InFlight,
    connection_bytes,
    connections_allowed,
    in_flight,
    places_allowed,
)
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.pipeline import AHEAD
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import Reduction
from ringside.engine.probe.prober import Effort, Probe, Prober
from ringside.engine.transports.base import Bytes, Kept, LinkFailure
from ringside.engine.tuner.selector import Tuner
from ringside.schedule import by_name

from .threaded import NativeByThreads, NoNative, on_threads
from .transports.schedules import run_schedule

MB = 1 << 20
FLOAT32 = DTYPES.index("float32")


# ------------------------------------------------------------------------------------------------ how much


def test_a_link_has_twice_rate_times_round_trip_on_its_way() -> None:
    gigabit = 119.5e6
    assert in_flight(gigabit * 10e-3, MB // 2, 4 * MB, 99) == InFlight(7, 1)
    assert in_flight(gigabit * 40e-3, MB // 2, 4 * MB, 99) == InFlight(21, 3)
    assert in_flight(gigabit * 40e-3, MB // 2, 4 * MB, 1) == InFlight(21, 1), "there is no room for more"
    assert in_flight(gigabit * 40e-3, MB // 2, 1, 99) == InFlight(21, 8), "eight will have to do"
    assert in_flight(gigabit, MB // 2, 1e12, 99) == InFlight(64, 1)
    assert in_flight(1.0, MB // 2, 4 * MB, 99) == InFlight(3, 1)
    assert in_flight(MB, MB // 2, MB // 4, 99) == InFlight(16, 8), "two places for each connection"


def test_what_a_connection_holds_is_what_the_kernel_lets_its_buffers_grow_to(tmp_path: Path) -> None:
    assert connection_bytes(tmp_path) == 4 * MB, "not said"
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t5000000\n")
    assert connection_bytes(tmp_path) == 5_000_000
    (tmp_path / "tcp_rmem").write_text("4096\t131072\t6000000\n")
    assert connection_bytes(tmp_path) == 3_000_000
    (tmp_path / "tcp_rmem").write_text("4096\n")
    assert connection_bytes(tmp_path) == 5_000_000


def test_connections_take_a_quarter_of_what_a_process_may_still_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (1124, 4096))
    monkeypatch.setattr(limits.os, "listdir", lambda _: ["0"] * 100)
    assert [connections_allowed(peers) for peers in (1, 63, 64, 300)] == [256, 4, 4, 1]
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (limits.resource.RLIM_INFINITY,) * 2)
    assert connections_allowed(10**6) == 8


def test_connections_where_it_is_not_known_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: str) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(limits.os, "listdir", unknown)
    assert connections_allowed(64) == 4


def test_places_take_no_more_memory_than_they_may() -> None:
    place = MB // 2 + MB // 4
    assert [places_allowed(peers, place) for peers in (1, 5, 63, 1000)] == [341, 68, 5, 0]


def test_there_are_never_fewer_places_than_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_BYTES", 2 * 6 * (3 << 13))

    def job(engine: HierarchicalEngine) -> list[int]:
        found = []
        for segments in (1, 2):
            engine.exchange.largest = MessageSize(segments << 14, 4)
            engine.widen(InFlight(9, 1))
            found.append(engine.exchange.window)
            engine.exchange.window = 4
        return found

    for found in on_threads(3, job, segment_bytes=1 << 14):
        assert found == [6, 4]


def test_there_are_no_connections_without_places() -> None:
    """Of many peers each has few places."""

    def job(engine: HierarchicalEngine) -> tuple[int, int]:
        engine.exchange.largest = MessageSize(limits.MOST_BYTES // 4 // 4 * 4, 4)
        engine.widen(InFlight(21, 8))
        return engine.exchange.window, engine.exchange.connections

    assert on_threads(2, job, segment_bytes=1 << 14) == [(4, 2)] * 2


def test_only_long_links_count() -> None:
    def held(latency_s: float) -> float:
        network = uniform(3, latency_s, 1e-8)
        none = np.zeros((3, 3))
        assert Probe(network, network.rates, none).round_trip_bytes == 0.0, "not known"
        return Probe(network, network.rates, none, shortest_s=network.latency_s).round_trip_bytes

    assert held(0.0019) == 0.0
    assert held(0.02) == pytest.approx(0.04 * 1e8)


def test_a_link_that_looks_fast_beside_the_others_does_not_count() -> None:
    """Segments may be kept somewhere, and then arrive together."""
    network = uniform(4, 0.02, 1e-8)
    per_byte = network.seconds_per_byte.copy()
    per_byte[0, 1] /= 50
    probe = Probe(replace(network, seconds_per_byte=per_byte), network.rates, per_byte, shortest_s=network.latency_s)
    assert probe.rates.max() == pytest.approx(50e8)
    assert probe.round_trip_bytes == pytest.approx(0.04 * 1e8)


def test_of_two_links_the_slower_one_counts() -> None:
    per_byte = np.array([[0.0, 1e-8], [0.5e-8, 0.0]])
    latency_s = 0.02 * (1 - np.eye(2))
    network = replace(uniform(2, 0.0, 1e-8), latency_s=latency_s, seconds_per_byte=per_byte)
    probe = Probe(network, network.rates, per_byte, shortest_s=network.latency_s)
    assert probe.round_trip_bytes == pytest.approx(0.04 * 1e8)


def test_a_slow_link_that_is_longer_than_the_others_does_not_hold_what_none_does() -> None:
    network = uniform(4, 0.003, 0.8e-9)
    latency_s, per_byte = network.latency_s.copy(), network.seconds_per_byte.copy()
    latency_s[0, 1] = latency_s[1, 0] = 0.1
    per_byte[0, 1] = per_byte[1, 0] = 1e-7
    network = replace(network, latency_s=latency_s, seconds_per_byte=per_byte)
    probe = Probe(network, network.rates, per_byte, shortest_s=latency_s)
    assert probe.round_trip_bytes == pytest.approx(0.006 / 0.8e-9)


# ------------------------------------------------------------------------------------------------ in a job


def fresh(path: Path) -> dict[str, str]:
    """Return what makes a tuner measure."""
    return {"RINGSIDE_SELECTION": "fresh", "RINGSIDE_CACHE_DIR": str(path)}


WAYS = ("ring", "tree*4", "direct", "recursive_doubling", "two_tree", "halving_doubling")


def sums(engine: HierarchicalEngine, turns: int) -> None:
    """All-reduce tensors of all kinds, and compare."""
    ranks = engine.rank_map.size
    for turn in range(turns):
        count = (300_000, 7, 40_000)[turn % 3]
        x = np.arange(count, dtype=np.float32) % 89 + engine.rank_map.rank + turn
        name = WAYS[turn % len(WAYS)]
        engine.all_reduce(x.ctypes.data, count, Reduction(FLOAT32, 0), AlgorithmSpec.parse(name))
        assert (x == (np.arange(count) % 89 + turn) * ranks + ranks * (ranks - 1) / 2).all(), f"{name}, {count}"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_connections_and_places_are_added_between_two_collectives(ranks: int) -> None:
    """Some links have carried something by then and others have not; ranks go on as soon as they like."""

    def job(engine: HierarchicalEngine) -> list[tuple[int, int]]:
        found = []
        for needed in (InFlight(4, 1), InFlight(7, 3), InFlight(5, 2), InFlight(9, 4)):
            engine.widen(needed)
            found.append((engine.exchange.window, engine.exchange.connections))
            sums(engine, 7)
        other = engine.channels.exchange(1)  # made now, it has as many
        assert (other.window, other.connections, other.largest) == (9, 4, engine.exchange.largest)
        return found

    for found in on_threads(ranks, job, segment_bytes=1 << 14):
        assert found == [(4, 1), (7, 3), (7, 3), (9, 4)], "never fewer"


def test_a_channel_beside_is_widened_too() -> None:
    """Some of what it carries afterwards comes into buffers that were posted before."""

    def job(engine: HierarchicalEngine) -> None:
        both = [engine.channels.exchange(0), engine.channels.exchange(1)]
        for exchange in both:
            sum_over(exchange)
        engine.widen(InFlight(6, 2))
        assert [(exchange.window, exchange.connections) for exchange in both] == [(6, 2), (6, 2)]
        for exchange in [*both, *both, *both]:
            sum_over(exchange)

    on_threads(2, job, segment_bytes=1 << 12)


def sum_over(exchange: Exchange) -> None:
    """All-reduce a tensor over one channel, and compare."""
    me, ranks = exchange.transport.rank, exchange.transport.size
    x = np.arange(9000, dtype=np.float32) % 89 + me
    run_schedule(exchange, by_name("ring", ranks), x)
    assert (x == np.arange(9000) % 89 * ranks + ranks * (ranks - 1) / 2).all()


class Short(Prober):
    """Finds links of a machine room."""

    def probe(self) -> Probe:
        """Return them."""
        network = uniform(2, 1e-4, 1 / 118e6)
        return Probe(network, network.rates, np.zeros((2, 2)), shortest_s=network.latency_s)


def test_no_link_is_touched_where_none_is_long(tmp_path: Path) -> None:
    """One connection, as many places as ever, and nothing between the interpreter and the transport."""

    def job(engine: HierarchicalEngine) -> None:
        Tuner(engine, environ=fresh(tmp_path), prober=Short(engine)).start()
        exchange = engine.exchange
        assert exchange.links is exchange.transport
        assert (exchange.window, exchange.connections) == (AHEAD + 1, 1)

    on_threads(2, job)


def test_a_reducer_at_the_switch_is_not_asked_to_take_part() -> None:
    board = Switchboard(3)
    rank_map = RankMap(0, ((0,), (1,)), ("a", "b"), ("", ""))
    engine = HierarchicalEngine(rank_map, Exchange(Threads(board, 0)), None, NoNative(), timeout_s=1)
    engine.widen(InFlight(9, 4))
    assert (engine.exchange.window, engine.exchange.connections) == (4, 1)


# ------------------------------------------------------------------------------------------------ far away


class Far(Threads):
    """Messages take a while, each way."""

    def __init__(self, board: Switchboard, rank: int, delay_s: float) -> None:
        super().__init__(board, rank)
        self.delay_s = delay_s
        self.orders_sent: Counter[int] = Counter()
        self.large_sent: defaultdict[int, list[int]] = defaultdict(list)  # by peer, the orders of whole segments
        self.under_way: queue.SimpleQueue[tuple[float, int, Bytes, int] | None] = queue.SimpleQueue()
        self.carrier = threading.Thread(target=self.deliver, daemon=True)
        self.carrier.start()

    def deliver(self) -> None:
        """Put every message where it is received, when it is time."""
        while (message := self.under_way.get()) is not None:
            due, peer, data, order = message
            time.sleep(max(due - time.monotonic(), 0.0))
            self.board.post(self.rank, peer, data, receiving=False, order=order)

    def send(self, peer: int, data: Bytes | Kept) -> Any:
        """It has left at once."""
        return self.send_in(self.order, peer, data)

    def send_in(self, order: int, peer: int, data: Bytes | Kept) -> Any:
        """Send a message of an order."""
        data = data[0] if isinstance(data, list) else data
        self.orders_sent[order] += 1
        if len(data) >= 1 << 16:
            self.large_sent[peer].append(order)
        self.under_way.put((time.monotonic() + self.delay_s, peer, data.copy(), order))
        return Left()

    def open_channel(self, connection: int = 0) -> Threads:
        """Return messages with an order of their own."""
        other, far = super().open_channel(connection), self

        class Beside(Threads):
            def send(self, peer: int, data: Bytes | Kept) -> Any:
                return far.send_in(self.order, peer, data)

        return Beside(other.board, other.rank, order=other.order)


class Left:
    def wait(self) -> None:
        """It has."""


def far_engines(n: int, delay_s: float, job: Any) -> list[Any]:
    """Run a job on n ranks that are far from each other; return what each returned."""
    board, own = Switchboard(n), Switchboard(n)
    far: dict[int, Far] = {}

    def run(rank: int) -> Any:
        rank_map = RankMap(rank, tuple((r,) for r in range(n)), tuple(f"host{r}" for r in range(n)), ("",) * n)
        far[rank] = Far(board, rank, delay_s)
        exchange = Exchange(far[rank], segment_bytes=1 << 16)
        return job(HierarchicalEngine(rank_map, exchange, None, NativeByThreads(own, rank), timeout_s=20))

    try:
        return each_on_a_thread(n, run, lambda rank: board.fail(LinkFailure("left", rank)))
    finally:
        for transport in far.values():
            transport.under_way.put(None)
            transport.carrier.join()


def test_all_ranks_agree_on_what_a_long_link_has_on_its_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the ranks' own systems allow differs: the least counts."""
    allowed = iter([10_000, 20_000, 15_000])
    guard = threading.Lock()

    def least() -> int:
        with guard:
            return next(allowed)

    monkeypatch.setattr("ringside.engine.tuner.selector.connection_bytes", least)
    monkeypatch.setattr("ringside.engine.tuner.selector.connections_allowed", lambda peers: 3)

    def job(engine: HierarchicalEngine) -> Any:
        tuner = Tuner(engine, environ=fresh(tmp_path))
        tuner.start()
        assert tuner.probe is not None
        sums(engine, 6)
        held = in_flight(tuner.probe.round_trip_bytes, 1 << 16, 10_000, 3)
        far = engine.exchange.transport
        assert isinstance(far, Far)
        return (engine.exchange.window, engine.exchange.connections), held, len(far.orders_sent)

    for found, held, orders in far_engines(3, 4e-3, job):
        assert found == held
        assert found[1] == 3
        assert orders == 1 + 3, "before, and over three connections"


ONCE = Effort(pings=3, bulk_s=1e-3, repeats=2, budget_s=0.0, flood=False, again=3)


def test_segments_that_time_a_long_link_follow_each_other_and_none_is_left_out() -> None:
    """Its connection is not idle between them, and its first idea of the rate is one of a window that opens."""

    def job(engine: HierarchicalEngine) -> list[int]:
        Prober(engine, effort=ONCE).probe()
        return [hop.src for hop in engine.exchange.hops if hop.size_bytes == engine.exchange.segment_bytes]

    near = on_threads(3, job, segment_bytes=1 << 16)
    assert [len(sources) for sources in near] == [4, 4, 4], "a first idea, and no time for more"
    for rank, sources in enumerate(far_engines(3, 4e-3, job)):
        others = sorted({0, 1, 2} - {rank})
        assert sorted(sources[:4]) == sorted(2 * others)
        assert sorted(sources[4:]) == sorted(16 * others)
        assert len(set(sources[4:20])) == len(set(sources[20:])) == 1


def test_segments_that_time_a_long_link_do_not_share_it_with_each_other() -> None:
    """On several connections they would arrive together, as if the link were faster the more there are."""

    def job(engine: HierarchicalEngine) -> tuple[dict[int, list[int]], int]:
        engine.widen(InFlight(7, 3))
        sums(engine, 6)
        far = engine.exchange.transport
        assert isinstance(far, Far)
        far.large_sent.clear()
        Prober(engine, effort=ONCE).probe()
        return far.large_sent, engine.exchange.window

    for large_sent, window in far_engines(3, 4e-3, job):
        assert len(large_sent) == 2
        for orders in large_sent.values():
            assert [len(set(orders[:2])), len(set(orders[2:])), len(orders)] == [1, 1, 2 + 16]
        assert window == 4 * 3, "of as many segments as usual there are places on that connection"


def arriving(engine: HierarchicalEngine, after_s: Callable[[int, int], list[float] | None]) -> None:
    """Have whole segments of a run come so many seconds after each other, by sender and number; None: as they do."""
    inner, hops, segment = engine.run, engine.exchange.hops, engine.exchange.segment_bytes

    def run(*args: Any, **more: Any) -> None:
        known = len(hops)
        inner(*args, **more)
        timed = [place for place in range(known, len(hops)) if hops[place].size_bytes == segment]
        gaps_s = after_s(hops[timed[0]].src, len(timed)) if timed else None
        if gaps_s is not None:
            for place, came_s in zip(timed, np.cumsum([0.0, *gaps_s]), strict=True):
                hops[place] = hops[place]._replace(last=hops[timed[0]].first + came_s)

    engine.run = run  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "open_s",
    [
        pytest.param([0.02, 0.0, 0.12, 0.02, 0.02, 0.02, 0.12, 0.02], id="the window ends"),
        pytest.param([0.02, 0.02, 0.08, 0.0, 0.0, 0.0, 0.02, 0.02], id="one packet was lost"),
        pytest.param([0.02, 0.0, 0.02, 0.12, 0.0, 0.02, 0.12, 0.12], id="both"),
    ],
)
def test_a_long_links_rate_is_that_of_most_segments_once_the_window_is_open(open_s: list[float]) -> None:
    """Some come late, as the window ends before them, and some with one that was lost and sent again."""
    opening_s = [0.16, 0.01] * 3 + [0.16]

    def job(engine: HierarchicalEngine) -> Probe:
        arriving(engine, lambda _, count: [*opening_s, *open_s] if count == 16 else None)
        return Prober(engine, effort=ONCE).probe()

    for probe in far_engines(2, 4e-3, job):
        assert probe.upper[~np.eye(2, dtype=np.bool_)] == pytest.approx((1 << 16) / 0.02)


@pytest.mark.parametrize(("again_s", "slow"), [(0.01, []), (9.0, [0])])
def test_a_hiccup_in_the_first_look_at_a_long_link_does_not_make_it_slow(again_s: float, slow: list[int]) -> None:
    """It looks too slow for a train, so nothing else would correct that."""
    asked: list[int] = []

    def job(engine: HierarchicalEngine) -> Probe:
        def after_s(src: int, count: int) -> list[float] | None:
            if (src, engine.rank_map.rank) != (0, 1):
                return [0.01] * (count - 1)
            asked.append(count)
            return [9.0] if count == 2 else [again_s] * (count - 1)

        arriving(engine, after_s)
        return Prober(engine, effort=ONCE).probe()

    for probe in far_engines(3, 4e-3, job):
        assert [link.src for link in probe.slow] == slow
    assert asked == [2, 4]

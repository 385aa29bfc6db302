"""Pieces of a large tensor: everything once, in the order in which messages need them, and nobody waits for ever."""

from __future__ import annotations

import functools
import threading
import time

import numpy as np
import pytest
from tests.support.thread_transport import Threads

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import DTYPES
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.pipeline import AHEAD, SegmentPipeline, SegmentPlan, WakeUp, lane_bounds, lay_out
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import Reduction, plan_reduction, signature_of
from ringside.errors import ClosedError
from ringside.schedule import ALGORITHMS, by_name

from .threaded import NoNative
from .transports.vertices import on_threads

WAIT_S = 20.0


@pytest.mark.parametrize("name", ["ring", "tree", "two_tree", "halving_doubling", "direct", "chain"])
@pytest.mark.parametrize("hosts", [2, 3, 5])
@pytest.mark.parametrize("elements", [1, 7, 1000, 12345])
def test_every_element_is_in_one_piece_and_one_lane(name: str, hosts: int, elements: int) -> None:
    for host in range(hosts):
        layout = lay_out(plan_messages(by_name(name, hosts), host), elements, 50, 400, lanes=2, local_ranks=3)
        at = 0
        for piece in layout.pieces:
            assert piece.begin == at
            assert piece.bounds[0] == 0
            assert piece.bounds[2] == piece.bounds[3], "the third rank carries nothing"
            assert list(piece.bounds) == sorted(piece.bounds)
            at += piece.bounds[-1]
        assert at == elements
        assert sorted(map(str, layout.fills)) == sorted(map(str, layout.pieces))
        assert sorted(map(str, layout.ends)) == sorted(map(str, layout.pieces))
        assert max(piece.bounds[-1] for piece in layout.pieces) <= 400


def test_what_is_no_larger_than_a_piece_is_one() -> None:
    layout = lay_out(plan_messages(by_name("ring", 2), 0), 100, 50, 400, lanes=1, local_ranks=1)
    assert [piece.bounds[-1] for piece in layout.pieces] == [50, 50]  # a chunk each


def test_hosts_cut_alike_and_a_ring_begins_with_its_own_chunk() -> None:
    layouts = [lay_out(plan_messages(by_name("ring", 4), host), 64_000, 1000, 9000, 2, 2) for host in range(4)]
    assert len({layout.pieces for layout in layouts}) == 1
    firsts = [layout.fills[0].chunk for layout in layouts]
    assert sorted(firsts) == [0, 1, 2, 3]
    for layout in layouts:
        assert layout.ends[-1].chunk != layout.fills[0].chunk or len({p.chunk for p in layout.pieces}) == 1
        assert len({piece.chunk for piece in layout.ends}) == 4


def test_a_ring_adds_up_what_it_receives_beside_what_it_sends() -> None:
    layout = lay_out(plan_messages(by_name("ring", 4), 1), 64_000, 1000, 1000, 2, 2)
    of_chunk = [piece.chunk for piece in layout.fills]
    own, coming, then, last = dict.fromkeys(of_chunk)
    each = of_chunk.count(own)
    assert of_chunk[:AHEAD] == [own] * AHEAD
    assert of_chunk[AHEAD : AHEAD + 8] == [own, coming] * 4
    assert of_chunk[2 * each :] == [then] * each + [last] * each


def test_lanes_share_a_part_evenly_and_ranks_beyond_have_none() -> None:
    assert lane_bounds(10, 2, 3) == (0, 5, 10, 10)
    assert lane_bounds(7, 3, 3) == (0, 3, 6, 7)
    assert lane_bounds(0, 2, 2) == (0, 0, 0)
    assert lane_bounds(1, 4, 4) == (0, 1, 1, 1, 1)


def stream() -> SegmentPipeline:
    layout = lay_out(plan_messages(by_name("ring", 2), 0), 4000, 1000, 1000, 1, 1)
    return SegmentPipeline(SegmentPlan(layout, [2] * len(layout.pieces)))


def test_messages_wait_for_what_is_added_up_and_sharing_for_all_segments() -> None:
    flow = stream()
    order: list[str] = []

    def messages() -> None:
        for segment in (0, 1):
            flow.wait(0, segment)
            order.append(f"sent {segment}")
            flow.ready(0, segment)

    thread = threading.Thread(target=messages)
    thread.start()
    order.append("filled")
    flow.filled(0)
    assert flow.ended(0)
    order.append("ended")
    thread.join(WAIT_S)
    assert order == ["filled", "sent 0", "sent 1", "ended"]


def test_when_one_half_fails_the_other_does_not_wait() -> None:
    flow = stream()
    seen: list[object] = []

    def messages() -> None:
        try:
            flow.wait(0, 0)
        except ClosedError as error:
            seen.append(error)

    thread = threading.Thread(target=messages)
    thread.start()
    flow.stop()
    thread.join(WAIT_S)
    assert len(seen) == 1
    assert not flow.ended(1)


def test_a_piece_without_messages_of_this_rank_is_ended_at_once() -> None:
    layout = lay_out(plan_messages(by_name("ring", 2), 0), 4000, 1000, 1000, 1, 2)
    course = SegmentPlan(layout, [0] * len(layout.pieces))
    assert course.ends
    assert all(SegmentPipeline(course).ended(piece) for piece in course.ends)


def test_a_bell_wakes_whoever_sleeps_each_time() -> None:
    """Two threads hand a number to and fro; a ring that is lost would leave both asleep."""
    here, there, turns = WakeUp(), WakeUp(), 3000
    said = {"here": 0, "there": 0}

    def answers() -> None:
        for number in range(1, turns + 1):
            there.wait_for(lambda number=number: said["here"] >= number, 20.0)
            said["there"] = number
            here.ring()

    thread = threading.Thread(target=answers)
    thread.start()
    late = 0
    for number in range(1, turns + 1):
        said["here"] = number
        there.ring()
        here.wait_for(lambda number=number: said["there"] >= number, 20.0)
        late += said["there"] < number
    thread.join(60)
    assert not thread.is_alive()
    assert (said["there"], late) == (turns, 0)


def test_a_bell_gives_up_after_a_time_whatever_was_rung_before() -> None:
    bell, looks = WakeUp(), 0

    def never() -> bool:
        nonlocal looks
        looks += 1
        return False

    bell.wait_for(never, 0.001)
    assert looks >= 2
    before = looks
    bell.ring()  # for a sleeper that has gone
    bell.ring()
    bell.wait_for(never, 0.001)
    assert looks >= before + 2, "it looked again, and gave up again"


def test_adding_up_waits_until_messages_need_more() -> None:
    layout = lay_out(plan_messages(by_name("ring", 2), 0), 40_000, 1000, 1000, 1, 1)
    course = SegmentPlan(layout, [1] * len(layout.pieces))
    flow, filled, enough = SegmentPipeline(course, 10 * WAIT_S), 0, threading.Semaphore(0)

    def fill() -> None:
        nonlocal filled
        for piece in course.fills:
            flow.pace(piece)
            flow.filled(piece)
            filled += 1
            enough.release()

    thread = threading.Thread(target=fill)
    thread.start()
    taken = {0: 0, 1: 0}
    try:
        for _ in range(4):
            assert enough.acquire(timeout=WAIT_S)
        for turn, piece in enumerate(layout.fills):
            assert filled <= turn + 4
            flow.wait(piece.chunk, taken[piece.chunk])
            if 0 < turn < len(layout.fills) - 3:
                assert enough.acquire(timeout=WAIT_S), "three more than messages need are to be ready"
            taken[piece.chunk] += 1
    finally:
        flow.stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()


class Recorded(SegmentPipeline):
    """A feed in which everything is there; notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def wait(self, chunk: int, segment: int) -> None:
        self.asked.append((chunk, segment))

    def ready(self, chunk: int, segment: int) -> None:
        """It is not wanted anywhere."""


def test_a_vertex_sends_its_own_only_a_little_ahead_of_what_comes() -> None:
    segments = 20

    def vertex(end: Threads) -> list[tuple[int, int]]:
        exchange, feed = Exchange(end, segment_bytes=64), Recorded()
        chunks = [[np.ones(16, np.float32).view(np.uint8) for _ in range(segments)] for _ in range(3)]
        what = Reduction(DTYPES.index("float32"), 0)
        part = plan_reduction(AlgorithmSpec("ring"), None, what, signature_of(what, 960), rank_map_of(3, end.rank))
        assert part.request is not None
        ExchangeRun(exchange, part.request, chunks, ordered=True, feed=feed).run()
        assert all((one.view(np.float32) == 3).all() for several in chunks for one in several)
        return feed.asked

    for asked in on_threads(3, vertex):
        own, coming = asked[0][0], asked[AHEAD + 1][0]
        assert own != coming
        for segment in range(AHEAD + 1, segments):
            assert asked.index((own, segment)) > asked.index((coming, segment - AHEAD - 1))


def rank_map_of(hosts: int, rank: int) -> RankMap:
    return RankMap(rank, tuple((r,) for r in range(hosts)), tuple(map(str, range(hosts))), ("",) * hosts)


@pytest.mark.parametrize(("hosts", "window"), [(2, 1), (3, 4), (5, 1)])
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"in_network"}))
def test_streams_end_with_the_sum_whatever_the_schedule(name: str, hosts: int, window: int) -> None:
    """Two at a time, the second begun while the first is between hosts."""
    count, choice, what = 30_000, AlgorithmSpec(name, "hosts"), Reduction(DTYPES.index("float32"), 0)
    all_done = threading.Barrier(hosts)

    def vertex(end: Threads) -> list[np.ndarray]:
        exchange = Exchange(end, segment_bytes=1000, window=window)
        engine = HierarchicalEngine(rank_map_of(hosts, end.rank), exchange, None, NoNative(), timeout_s=WAIT_S)
        tensors = [np.arange(count, dtype=np.float32) % 97 + end.rank for _ in range(2)]
        pending = [engine.start(x.__array_interface__["data"][0], count, what, choice) for x in tensors]
        for one in pending:
            one.wait()
        all_done.wait(WAIT_S)  # who leaves early takes with it what others have not taken yet
        engine.close()
        return tensors

    want = hosts * (np.arange(count, dtype=np.float32) % 97) + sum(range(hosts))
    for tensors in on_threads(hosts, vertex):
        for x in tensors:
            np.testing.assert_array_equal(x, want)


def test_one_that_is_held_up_does_not_hold_up_the_one_begun_behind_it() -> None:
    """Whichever host is the slow one: what was begun second travels on links of its own."""
    count, choice, what = 20_000, AlgorithmSpec("ring", "hosts"), Reduction(DTYPES.index("float32"), 0)
    go_on, second_is_there = threading.Event(), threading.Barrier(2)

    def vertex(end: Threads) -> None:
        engine = HierarchicalEngine(
            rank_map_of(2, end.rank), Exchange(end, segment_bytes=1000), None, NoNative(), timeout_s=WAIT_S
        )
        if end.rank == 1:
            engine.channels.submit(
                functools.partial(go_on.wait, WAIT_S)
            )  # nothing of the first one leaves this host before that
        tensors = [np.full(count, end.rank + 1.0, dtype=np.float32) for _ in range(3)]
        begun = [engine.start(x.__array_interface__["data"][0], count, what, choice) for x in tensors[:2]]
        ends_by = time.monotonic() + WAIT_S
        while not (tensors[1] == 3.0).all() and time.monotonic() < ends_by:
            time.sleep(1e-3)
        assert (tensors[1] == 3.0).all()
        assert not (tensors[0] == 3.0).any()
        second_is_there.wait(WAIT_S)
        go_on.set()
        begun[0].wait()
        begun.append(engine.start(tensors[2].__array_interface__["data"][0], count, what, choice))
        for one in begun:
            one.wait()
        assert [one.channel for one in begun] == [0, 1, 0]
        for x in tensors:
            np.testing.assert_array_equal(x, 3.0)
        second_is_there.wait(WAIT_S)
        engine.close()

    on_threads(2, vertex)

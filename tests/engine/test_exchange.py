"""The interpreter of schedules over messages, on threads: the suite, its headers, its timers, its segments."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from tests.support.thread_transport import Switchboard, Threads

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import DTYPES
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES
from ringside.engine.net.exchange.signature import SignatureMismatch
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.reduction import Reduction
from ringside.engine.transports.base import LinkError, LinkFailure
from ringside.schedule import by_name, pipelined, ring, run, tree

from .oracle import difference, elements
from .threaded import on_threads as engine_threads
from .transports.schedules import be_a_switch, by_exchange, check_engine, run_schedule
from .transports.vertices import on_threads

SIZES = (2, 3, 4, 5, 8)


@pytest.mark.parametrize("segment_bytes", [256, 1 << 18])
@pytest.mark.parametrize("size", SIZES)
def test_every_schedule(size: int, segment_bytes: int) -> None:
    """With a switch beside the ranks, segments so small that many are under way, and so large that one is enough."""

    every = 4 if size > 4 else 1

    def vertex(end: Threads) -> list[int] | None:
        exchange = Exchange(end, segment_bytes=segment_bytes, window=2)
        if end.rank == size:
            return be_a_switch(exchange, size, every=every)
        return check_engine(by_exchange(exchange, size), end.rank, size, switches=True, every=every)

    digests = on_threads(size + 1, vertex)[:size]
    assert all(d == digests[0] for d in digests), "ranks hold different bits"


# ------------------------------------------------------------------------------------------------ segments


@pytest.mark.parametrize(("segment_bytes", "window"), [(3, 1), (12, 1), (100, 3), (4096, 4)])
def test_a_result_does_not_depend_on_the_segments(segment_bytes: int, window: int) -> None:
    """Not even where they are shorter than an element."""

    def vertex(end: Threads) -> Any:
        exchange = Exchange(end, segment_bytes=segment_bytes, window=window)
        found = []
        for name in ("ring", "two_tree", "halving_doubling", "one_shot"):
            x = elements("float64", 301, end.rank)
            run_schedule(exchange, by_name(name, 4), x, "float64")
            found.append(x)
        return found

    inputs = np.stack([elements("float64", 301, rank) for rank in range(4)])
    results = on_threads(4, vertex)
    for at, name in enumerate(("ring", "two_tree", "halving_doubling", "one_shot")):
        with np.errstate(all="ignore"):
            want = run(by_name(name, 4), inputs)
        for rank in range(4):
            assert not difference(results[rank][at], want[rank], "float64")


def test_several_segments_are_under_way() -> None:
    """All segments of a link that wait for nothing are sent before anything has come back."""
    board = Switchboard(2)
    root = int(tree(2).round(0).dst[0])
    places = [np.zeros(HEADER_BYTES + 400, np.uint8) for _ in range(10)]
    receives = [Threads(board, root).receive(1 - root, into) for into in places]
    ended = []

    def leaf() -> None:
        exchange = Exchange(Threads(board, 1 - root), segment_bytes=400)
        with pytest.raises(LinkError):
            run_schedule(exchange, tree(2), np.arange(1000, dtype=np.float32))
        ended.append(True)

    thread = threading.Thread(target=leaf, daemon=True)
    thread.start()
    for pending in receives:
        pending.wait()
    got = np.concatenate([places[0][HEADER_BYTES:], *(into[:400] for into in places[1:])])
    assert (got.view(np.float32) == np.arange(1000)).all()
    Threads(board, root).close()
    thread.join(20)
    assert ended


def test_messages_of_several_collectives_may_be_in_one_link() -> None:
    """A rank that is done goes on to the next collective while its neighbours are still in the last."""

    def vertex(end: Threads) -> float:
        exchange = Exchange(end, segment_bytes=64, window=2)
        total = 0.0
        for k in range(60):
            x = np.full(50, float(end.rank + k), dtype=np.float32)
            run_schedule(exchange, by_name(("ring", "tree", "one_shot", "parameter_server")[k % 4], 5), x)
            assert (x == 10 + 5 * k).all()
            total += float(x[0])
        return total

    assert len(set(on_threads(5, vertex))) == 1


def test_two_exchanges_at_once() -> None:
    """Two groups, two threads per rank, different schedules."""
    boards = [Switchboard(4), Switchboard(4)]

    def vertex(end: Threads) -> bool:
        fine = []

        def use(board: Switchboard, name: str, op: str) -> None:
            exchange = Exchange(Threads(board, end.rank), segment_bytes=256)
            for k in range(30):
                x = np.arange(500, dtype=np.float32) + end.rank + k
                run_schedule(exchange, by_name(name, 4), x, op=op)
                want = (np.arange(500) + k) * 4 + 6 if op == "sum" else np.arange(500) + k + 3
                fine.append(bool((x == want).all()))

        other = threading.Thread(target=use, args=(boards[0], "tree", "max"))
        other.start()
        use(boards[1], "ring", "sum")
        other.join(30)
        return len(fine) == 60 and all(fine)

    assert all(on_threads(4, vertex))


# ------------------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("name", ["ring", "two_tree", "parameter_server", "halving_doubling", "one_shot"])
@pytest.mark.parametrize("count", [1, 6000])
def test_bytes_are_those_of_the_schedule(name: str, count: int) -> None:
    """Each link carries its payload and one header per collective, whether it has anything to carry or not."""
    schedule = by_name(name, 4)

    def vertex(end: Threads) -> tuple[dict[int, int], list[Any]]:
        exchange = Exchange(end, segment_bytes=1024)
        run_schedule(exchange, schedule, np.ones(count, dtype=np.float32))
        return dict(exchange.sent_bytes), list(exchange.hops)

    results = on_threads(4, vertex)
    links: dict[tuple[int, int], int] = {}
    bounds = np.arange(schedule.chunks + 1) * count // schedule.chunks
    for k in range(schedule.rounds):
        for src, dst, chunk, _ in schedule.round(k):
            links[src, dst] = links.get((src, dst), HEADER_BYTES) + 4 * int(bounds[chunk + 1] - bounds[chunk])
    assert {(src, dst): size for src in range(4) for dst, size in results[src][0].items()} == links
    for dst in range(4):
        payload: dict[int, int] = {}
        for hop in results[dst][1]:
            payload[hop.src] = payload.get(hop.src, 0) + hop.size_bytes
        assert {src: HEADER_BYTES + size for src, size in payload.items()} == {
            src: size for (src, to), size in links.items() if to == dst and size > HEADER_BYTES
        }


def test_hops_are_timed_in_order() -> None:
    """Waited, first byte, last byte; in the order of rounds; numbered by the collective."""

    def vertex(end: Threads) -> list[Any]:
        exchange = Exchange(end, segment_bytes=512)
        for _ in range(3):
            run_schedule(exchange, ring(3), np.ones(3000, dtype=np.float32))
        return list(exchange.hops)

    for rank, hops in enumerate(on_threads(3, vertex)):
        assert [(hop.seq, hop.round) for hop in hops] == [(seq, k) for seq in (1, 2, 3) for k in range(4)]
        assert all(hop.src == (rank - 1) % 3 for hop in hops)
        assert all(hop.size_bytes == 4000 for hop in hops)
        assert all(hop.waited <= hop.first <= hop.last for hop in hops)
        assert all(a.last <= b.waited for a, b in itertools.pairwise(hops))


def test_a_late_sender_shows_before_the_first_byte() -> None:
    """What its receiver waits for it is before the first byte, not between the first and the last."""
    board, gate = Switchboard(2), threading.Event()
    hops: list[Any] = []

    def late() -> None:
        gate.wait(20)
        run_schedule(Exchange(Threads(board, 1)), by_name("one_shot", 2), np.ones(9, dtype=np.float32))

    def punctual() -> None:
        exchange = Exchange(Threads(board, 0))
        run_schedule(exchange, by_name("one_shot", 2), np.ones(9, dtype=np.float32))
        hops.extend(exchange.hops)

    threads = [threading.Thread(target=job, daemon=True) for job in (late, punctual)]
    for thread in threads:
        thread.start()
    assert not hops, "nothing has come before it was sent"
    gate.set()
    for thread in threads:
        thread.join(20)
    (hop,) = hops
    assert hop.first == hop.last


# ------------------------------------------------------------------------------------------------ disagreement


@pytest.mark.parametrize("difference_in", ["dtype", "op", "count", "nothing at all", "schedule", "segments"])
def test_who_called_something_else_is_found(difference_in: str) -> None:
    """Whoever gets a message of another collective says whose it is and what both called; nobody hangs."""

    def vertex(end: Threads) -> str:
        odd = end.rank == 2
        exchange = Exchange(end, segment_bytes=2048 if odd and difference_in == "segments" else 4096)
        counts = {"count": 101, "nothing at all": 0}
        count = counts.get(difference_in, 100) if odd else 100
        dtype = "int32" if odd and difference_in == "dtype" else "float32"
        op = "max" if odd and difference_in == "op" else "sum"
        schedule = pipelined(ring(4), 2) if odd and difference_in == "schedule" else ring(4)
        try:
            run_schedule(exchange, schedule, np.ones(count, dtype=dtype), dtype, op)
        except SignatureMismatch as error:
            end.fail(LinkFailure("disagreed", error.peer))
            return "found" if 2 in (error.peer, end.rank) else f"blames {error.peer}"
        except LinkError as error:
            return f"told: {error.cause.kind}"
        return "finished"

    found = on_threads(4, vertex)
    assert "found" in found
    assert set(found) <= {"found", "told: disagreed"}


def test_a_collective_more_on_one_rank_is_found() -> None:
    """A rank that has left one out is a number behind, whatever it calls."""

    def vertex(end: Threads) -> str:
        exchange = Exchange(end)
        try:
            for _ in range(3 if end.rank else 2):
                run_schedule(exchange, ring(3), np.ones(10, dtype=np.float32))
            if end.rank == 0:
                run_schedule(exchange, ring(3), np.ones(11, dtype=np.float32))
        except (SignatureMismatch, LinkError):
            end.fail(LinkFailure("disagreed", end.rank))
            return "refused"
        return "finished"

    assert on_threads(3, vertex) == ["refused"] * 3


@pytest.mark.parametrize(("name", "messages"), [("halving_doubling", 6), ("recursive_doubling", 3), ("direct", 14)])
def test_small_chunks_of_a_round_share_a_message(name: str, messages: int) -> None:
    """Halving-doubling of 8 ranks moves 14 chunks in six rounds to one rank each: six messages, not 14."""

    def job(engine: HierarchicalEngine) -> tuple[int, bool]:
        counts: list[int] = []
        send = engine.exchange.transport.send
        engine.exchange.transport.send = lambda peer, data: counts.append(peer) or send(peer, data)  # type: ignore
        right = True
        for count in (1000, 3, 100_000):
            counts.clear()
            x = np.arange(count, dtype=np.float32) + engine.rank_map.rank
            engine.all_reduce(x.ctypes.data, count, Reduction(DTYPES.index("float32"), 0), AlgorithmSpec(name))
            right = right and bool((x == 8 * np.arange(count, dtype=np.float32) + 28).all())
            if count == 1000:
                small = len(counts)
        return small, right

    assert engine_threads(8, job) == [(messages, True)] * 8

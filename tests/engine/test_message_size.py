"""Messages of several sizes: which schedules have small ones, and places that always fit what comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.thread_transport import Threads

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import DTYPES
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.exchange.exchange import Exchange, ExchangeRequest
from ringside.engine.net.exchange.message_size import MessageSize, size_of
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES, ReceiveBuffers, ReceiveQueue
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature, SignatureMismatch
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.persistent import MOST_BYTES
from ringside.engine.net.reduction import Reduction, make_fold
from ringside.engine.transports.base import Bytes
from ringside.schedule import ALGORITHMS, by_name, chain, pipelined, tree, two_tree

from .threaded import on_threads
from .transports.vertices import on_threads as on_vertices

LARGE = MessageSize(1 << 19, 4)
SMALL = MessageSize(1 << 17, 16, 32, 4)
LEAST = MessageSize(1 << 16, 16, 64, 8)
SIZE = 1 << 24


def test_small_messages_are_a_quarter_and_as_many_bytes_are_on_their_way() -> None:
    assert LARGE.smaller() == SMALL
    assert SMALL.window * SMALL.segment_bytes == LARGE.window * LARGE.segment_bytes
    assert SMALL.ahead * SMALL.segment_bytes == LARGE.ahead * LARGE.segment_bytes
    assert [size.places(ordered=True) for size in (LARGE, SMALL, LEAST)] == [4, 16, 16]
    assert [size.places(ordered=False) for size in (LARGE, SMALL, LEAST)] == [4, 8, 16]
    assert LARGE.smaller(8) == LEAST
    assert LEAST.ahead * LEAST.segment_bytes == SMALL.ahead * SMALL.segment_bytes
    assert MessageSize(8, 4).smaller().segment_bytes == 8  # an element at least


@pytest.mark.parametrize("ranks", range(2, 18))
def test_where_flows_do_not_share_links_or_nothing_is_handed_on_messages_are_large(ranks: int) -> None:
    names = {"ring", "direct", "one_shot", "parameter_server", "in_network"}
    if ranks & (ranks - 1) == 0:
        names |= {"halving_doubling", "recursive_doubling"}
    for name in names:
        assert size_of(by_name(name, ranks), SIZE, LARGE) == LARGE, name


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 9, 12])
def test_where_flows_share_links_they_are_small(ranks: int) -> None:
    schedules = [by_name(name, ranks) for name in ("tree", "halving_doubling", "recursive_doubling")]
    schedules += [pipelined(two_tree(ranks), 32), pipelined(chain(ranks), 32), pipelined(tree(ranks), 32)]
    for schedule in schedules:
        assert size_of(schedule, SIZE, LARGE) == SMALL, schedule.name


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_chunks_that_fit_a_small_message_travel_in_large_ones(name: str) -> None:
    schedule = by_name(name, 6)
    assert size_of(schedule, schedule.chunks * SMALL.segment_bytes, LARGE) == LARGE


@pytest.mark.parametrize("segment_bytes", [64, 4096, 1 << 16, 1 << 19, 1 << 22])
def test_what_a_script_can_carry_out_travels_in_large_messages(segment_bytes: int) -> None:
    """One rank may have it prepared and another one not: they must agree on the size."""
    assert size_of(tree(6), MOST_BYTES, MessageSize(segment_bytes, 4)).segment_bytes == segment_bytes


def test_on_fast_links_messages_are_large() -> None:
    """There the processor is what they wait for, and it has a quarter of the messages to handle."""
    assert size_of(tree(6), SIZE, LARGE, None) == size_of(tree(6), SIZE, LARGE, 119e6) == SMALL
    assert size_of(tree(6), SIZE, LARGE, 1.2e9) == LARGE


def test_on_links_that_are_known_to_be_slow_they_are_smaller_still() -> None:
    for schedule in (tree(6), by_name("halving_doubling", 7), pipelined(two_tree(8), 32)):
        assert size_of(schedule, SIZE, LARGE, 15e6) == LEAST
        assert size_of(schedule, SIZE, LARGE, 119e6) == size_of(schedule, SIZE, LARGE) == SMALL
    assert size_of(by_name("ring", 7), SIZE, LARGE, 15e6) == LARGE
    assert LEAST.segment_bytes < SMALL.segment_bytes == LARGE.small_place_bytes, "they fit the places of the others"


def test_a_schedule_that_is_too_long_to_look_through_has_large_messages() -> None:
    assert [size_of(chain(ranks), 1 << 30, LARGE) for ranks in (112, 113)] == [SMALL, LARGE]
    assert size_of(pipelined(chain(1000), 8), 1 << 34, LARGE) == LARGE


@given(
    elements=st.integers(0, 300),
    segment_bytes=st.integers(8, 100),
    item=st.sampled_from([1, 2, 4, 8]),
    parts=st.sampled_from([1, 4, 8]),
    narrow=st.booleans(),
)
def test_what_is_cut_evenly_fits_its_places(
    elements: int, segment_bytes: int, item: int, parts: int, narrow: bool
) -> None:
    """Every message does, none has half as much as another, and as many are foreseen as there are."""
    item, wire = (4, WireCompression("bfloat16")) if narrow else (item, None)
    exchange, large = Exchange(Posted(), segment_bytes=segment_bytes), MessageSize(segment_bytes, 4)
    size = large.smaller(parts) if parts > 1 else large
    memory = np.arange(elements * item, dtype=np.uint8)
    segments = exchange.cut(memory, item, wire, size)
    assert b"".join(map(bytes, segments)) == memory.tobytes()
    assert len(segments) == size.messages_of(len(memory), exchange.segment_of(item, wire, size))
    lengths = [len(segment) // item for segment in segments]
    assert all(len(segment) % item == 0 for segment in segments)
    assert max(lengths, default=0) - min(lengths, default=0) <= 1
    on_wire = max(lengths, default=0) * (2 if narrow else item)
    assert on_wire <= (large.place_bytes if parts == 1 else large.small_place_bytes)


# ------------------------------------------------------------------------------------------------ places


class Posted:
    """Links that note the length of every place that is posted; messages come when told."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.places: list[int] = []

    def keep(self, data: Bytes) -> list[Any]:
        return [data]

    def send(self, peer: int, data: Any) -> Any:
        raise AssertionError("nothing is sent here")

    def receive(self, peer: int, into: Any) -> Posted:
        self.places.append(len(into[0]))
        return self

    def wait(self) -> None:
        """It has come."""


@given(
    collectives=st.lists(
        st.tuples(st.integers(1, 60), st.booleans(), st.booleans(), st.integers(0, 40)), min_size=1, max_size=6
    )
)
def test_messages_that_may_be_large_meet_large_places(collectives: list[tuple[int, bool, bool, int]]) -> None:
    """Whatever comes in turn: messages in number, small or not, expected one by one or not, and how far ahead."""
    links = Posted()
    buffers = ReceiveBuffers(links, 1, 400, 4)
    may_be_large: list[bool] = []
    for count, small, paced, ahead in collectives:
        buffers.ensure_small(100, 12)
        queue = ReceiveQueue(buffers, lambda place: None, paced=paced, small=count if small else 0, window=16)
        for number in range(count):
            if paced:
                queue.expect(min(number + ahead, count - 1))
            queue.free(queue.receive(number))
            may_be_large.append(not small or number == 0)
        queue.finish()
        assert len(links.places) == len(may_be_large) + 4, "places for the next collective, and no more"
        assert links.places[-4:] == [400] * 4
    assert all(length == 400 for length, large in zip(links.places, may_be_large, strict=False) if large)


def test_small_places_are_posted_as_far_as_there_are_messages() -> None:
    links = Posted()
    buffers = ReceiveBuffers(links, 1, 400, 4)
    buffers.ensure_small(100, 12)
    queue = ReceiveQueue(buffers, lambda place: None, small=9, window=16)
    queue.receive_next()
    assert links.places == [400] * 4 + [100] * 5
    other = ReceiveBuffers(links, 1, 400, 4)
    del links.places[:]
    other.ensure_small(100, 12)
    ReceiveQueue(other, lambda place: None, small=90, window=16).receive_next()
    assert links.places == [100] * 12


@pytest.mark.parametrize("paced", [False, True])
def test_there_are_no_small_places_before_the_header_has_been_compared(paced: bool) -> None:
    """Whoever called something else may send messages of any length, and one that is too long ends the process."""
    links = Posted()
    buffers = ReceiveBuffers(links, 1, 400, 4)
    buffers.ensure_small(100, 12)

    def compare(place: Bytes) -> None:
        assert links.places == [400] * 4
        raise SignatureMismatch(1, None, None)  # type: ignore[arg-type]

    queue = ReceiveQueue(buffers, compare, paced=paced, small=50, window=16)
    if paced:
        queue.expect(30)
    with pytest.raises(SignatureMismatch):
        queue.receive_next()
    assert links.places == [400] * 4


# ------------------------------------------------------------------------------------------------ collectives

WAYS = ("tree", "ring", "halving_doubling", "two_tree*4", "recursive_doubling", "chain*4", "parameter_server")


@pytest.mark.parametrize("ranks", [5, 6])
def test_collectives_of_small_and_of_large_messages_follow_each_other(ranks: int) -> None:
    """A place that is too small would be refused by the threads' transport; ranks run as far ahead as they like."""

    def job(engine: HierarchicalEngine) -> list[int]:
        sizes = []
        for turn in range(2 * len(WAYS)):
            engine.exchange.bytes_per_s = (None, 1e6)[turn % 2]  # as all agree, between two collectives
            name, count = WAYS[(3 * turn) % len(WAYS)], (150_000, 400_000, 20)[turn % 3]
            x = np.arange(count, dtype=np.float32) % 97 + engine.rank_map.rank
            engine.all_reduce(x.ctypes.data, count, Reduction(DTYPES.index("float32"), 0), AlgorithmSpec.parse(name))
            want = np.arange(count) % 97 * ranks + ranks * (ranks - 1) / 2
            assert (x == want).all(), f"{name}, {count} elements"
            schedule = AlgorithmSpec.parse(name).schedule(ranks)
            sizes.append(engine.exchange.size_of(schedule, 4 * count, 4, None).segment_bytes)
        return sizes

    sizes = on_threads(ranks, job, segment_bytes=1 << 16)
    assert all(one == sizes[0] for one in sizes)
    assert {1 << 16, 1 << 14, 1 << 13} <= set(sizes[0]), "all sizes took part"


def test_small_messages_are_sent() -> None:
    """A leaf of a tree sends a large chunk in messages of a quarter."""

    def vertex(end: Threads) -> list[int]:
        lengths: list[int] = []
        send = end.send
        end.send = lambda peer, data: lengths.append(len(data)) or send(peer, data)  # type: ignore
        exchange = Exchange(end, segment_bytes=1 << 16)
        x = np.ones(50_000, dtype=np.float32)
        code = DTYPES.index("float32")
        plan, size = plan_messages(tree(3), end.rank), exchange.size_of(tree(3), x.nbytes, x.itemsize, None)
        call = CollectiveSignature(0, code, 0, len(x))
        request = ExchangeRequest(plan, 4, make_fold(code, 0), call)
        ExchangeRun(exchange, request, [x.view(np.uint8)], ordered=True, size=size).run()
        assert (x == 3).all()
        return lengths

    leaf = on_vertices(3, vertex)[1]
    assert leaf == [HEADER_BYTES + (1 << 14), *[1 << 14] * 11, 200_000 % (1 << 14)]

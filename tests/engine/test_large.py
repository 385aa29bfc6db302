"""Large all-reduces over hosts, made ready once: right every time, whatever lies there and whatever has changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import DTYPES
from ringside.engine.net.context import EngineContext
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.persistent import PersistentLarge
from ringside.engine.net.reduction import AVG, Reduction
from ringside.errors import UsageError

from .threaded import on_threads

F32 = DTYPES.index("float32")
ELEMENTS = 300_001  # of 1.2 MB: several messages of a link


def on_ranks(count: int, job: Callable[[HierarchicalEngine], Any]) -> list[Any]:
    """Run a job on ranks that are hosts of their own, and have them leave when all are through."""
    through = threading.Barrier(count, timeout=30.0)

    def one(engine: HierarchicalEngine) -> Any:
        try:
            found = job(engine)
            through.wait()
            return found
        finally:
            engine.close()

    return on_threads(count, one)


def reduced(engine: HierarchicalEngine, x: np.ndarray, what: Reduction, choice: AlgorithmSpec) -> None:
    engine.all_reduce(x.ctypes.data, x.size, what, choice)


class Made:
    """What was made ready: by which ranks, and what of it is still there."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self._alive = [weakref.WeakSet[PersistentLarge]() for _ in range(3)]

    def note(self, one: PersistentLarge, rank: int) -> None:
        self.ranks.append(rank)
        self._alive[rank].add(one)

    def kept(self, rank: int) -> int:
        gc.collect()
        return len(self._alive[rank])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    found, make = Made(), PersistentLarge.__init__

    def noted(self: PersistentLarge, context: EngineContext, *args: Any) -> None:
        found.note(self, context.rank_map.rank)
        make(self, context, *args)

    monkeypatch.setattr(PersistentLarge, "__init__", noted)
    return found


@pytest.mark.parametrize("name", ["ring", "tree*4", "halving_doubling", "two_tree"])
def test_the_same_tensor_again_and_again(name: str, made: Made) -> None:

    def rank(engine: HierarchicalEngine) -> list[np.ndarray]:
        x, found = np.empty(ELEMENTS, np.float32), []
        for turn in range(3):
            x[:] = (engine.rank_map.rank + 1) * (turn + 1)
            reduced(engine, x, Reduction(F32, AVG, scale=0.5), AlgorithmSpec.parse(f"hosts/{name}"))
            found.append(x.copy())
        return found

    for found in on_ranks(3, rank):
        for turn, x in enumerate(found):
            assert (x == (turn + 1)).all()
    assert sorted(made.ranks) == [0, 1, 2], "made ready once on every rank"


def test_what_has_changed_is_made_ready_anew(made: Made) -> None:
    """Another place, another reduction, another way, and links of which more is known since."""

    def rank(engine: HierarchicalEngine) -> None:
        x, y = np.ones((2, ELEMENTS), np.float32)
        ring, total = AlgorithmSpec.parse("hosts/ring"), Reduction(F32, 0)
        for tensor, what, choice in (
            (x, total, ring),
            (x, total, ring),
            (y, total, ring),
            (x, Reduction(F32, 0, scale=2.0), ring),
            (x, total, AlgorithmSpec.parse("leaders/ring")),
        ):
            tensor[:] = 1.0
            reduced(engine, tensor, what, choice)
            assert (tensor == 2 * what.scale).all()
        engine.exchange.bytes_per_s = 1e7
        x[:] = 1.0
        reduced(engine, x, total, ring)
        assert (x == 2).all()

    on_ranks(2, rank)
    assert sorted(made.ranks) == 5 * [0] + 5 * [1]


def test_no_more_are_kept_than_that(made: Made) -> None:
    def rank(engine: HierarchicalEngine) -> int:
        engine.max_large = 2
        tensors = np.ones((3, ELEMENTS), np.float32)
        for _ in range(2):
            tensors[:] = 1.0
            for tensor in tensors:
                reduced(engine, tensor, Reduction(F32, 0), AlgorithmSpec.parse("hosts/ring"))
            assert (tensors == 2).all()
        return made.kept(engine.rank_map.rank)

    assert on_ranks(2, rank) == [2, 2]
    assert sorted(made.ranks) == 6 * [0] + 6 * [1], "the last one that was used stays"


def test_two_beside_each_other_and_what_cannot_be_is_refused_every_time() -> None:
    def rank(engine: HierarchicalEngine) -> None:
        x, y = np.ones((2, ELEMENTS), np.float32)
        what, ring = Reduction(F32, 0), AlgorithmSpec.parse("hosts/ring")
        for _ in range(3):
            x[:], y[:] = 1.0, 2.0
            first = engine.start(x.ctypes.data, x.size, what, ring)
            second = engine.start(y.ctypes.data, y.size, what, ring)
            assert {first.channel, second.channel} == {0, 1}
            second.wait()
            first.wait()
            assert (x == 3).all()
            assert (y == 6).all()
            with pytest.raises(UsageError, match="switch"):
                engine.start(x.ctypes.data, x.size, what, AlgorithmSpec.parse("leaders/in_network"))

    on_ranks(3, rank)


def test_peers_are_told_of_the_oldest_that_is_under_way_and_each_is_recorded_once() -> None:
    def rank(engine: HierarchicalEngine) -> None:
        x, y = np.ones((2, ELEMENTS), np.float32)
        small = np.ones(4, np.float32)
        what, ring, transport = Reduction(F32, 0), AlgorithmSpec.parse("hosts/ring"), engine.exchange.transport
        recorded: list[tuple[str, bool]] = []
        first = engine.start(x.ctypes.data, x.size, what, ring)
        assert (transport.number, str(transport.doing)) == (
            1,
            f"all_reduce(sum, float32, {ELEMENTS} elements) by hosts/ring",
        )
        second = engine.start(y.ctypes.data, y.size, what, ring)
        assert (first.number, second.number, engine.begun, transport.number) == (1, 2, 2, 1)
        assert transport.doing is first.operation
        assert not first.is_done
        for name, pending in (("first", first), ("second", second)):
            pending.record = lambda one, name=name: recorded.append((name, one.is_done))  # type: ignore[misc]
        second.wait()
        assert first.is_done, "in the order in which they were started"
        assert recorded == [("second", True)]
        assert (transport.number, transport.doing) == (2, "")
        for _ in range(2):
            first.wait()
        assert recorded == [("second", True), ("first", True)]
        assert first.took_s > 0
        assert second.took_s > 0
        assert not engine.pending
        whole = engine.start(small.ctypes.data, small.size, what, AlgorithmSpec("ring"))
        assert (whole.is_done, whole.size_bytes, engine.begun, transport.number) == (True, 16, 3, 3)
        third = engine.start(x.ctypes.data, x.size, what, ring)
        reduced(engine, small, what, AlgorithmSpec("ring"))
        assert third.is_done, "anything else finishes it first"
        assert (transport.number, transport.doing, engine.begun) == (5, "", 5)
        assert [engine.pieces_from_bytes(wire) for wire in (None, WireCompression("bfloat16"))] == [1 << 19, 1 << 20]

    on_ranks(2, rank)

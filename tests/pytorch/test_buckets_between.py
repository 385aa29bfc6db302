"""Buckets between hosts while choices are tried: each trial has the links for itself, and counts as such."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.engine.threaded import on_threads

from ringside._core.enums import ReduceOp
from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.buffers import Flat
from ringside.engine.dtypes import DTYPES, ITEM_BYTES
from ringside.engine.net.exchange.signature import CollectiveSignature, Operation
from ringside.engine.net.hierarchical import PendingAllReduce
from ringside.engine.net.reduction import ALL_REDUCE, Reduction
from ringside.engine.tuner.selector import Tuner
from ringside.engine.tuner.table import Rank, TimingRow, TimingTable
from ringside.pytorch.communicator.between_hosts import STEADY, BetweenHosts
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.recording import session as sessions

MB = 1 << 20
FLOAT32, FLOAT64 = DTYPES.index("float32"), DTYPES.index("float64")


class Recorded:
    """A `HierarchicalEngine` and a `Tuner` that only record what is called, in order."""

    def __init__(self, tried: set[int]) -> None:
        self.said: list[str] = []
        self.tried = tried
        self.pending, self.last_ended, self.begun = deque[PendingAllReduce](), 0.0, 0

    def start(self, address: int, elements: int, reduction: Any, choice: AlgorithmSpec) -> PendingAllReduce:
        self.said.append(f"begin {elements}")
        engine: Any = self
        operation = Operation(CollectiveSignature(ALL_REDUCE, FLOAT32, 0, elements), str(choice))
        pending = PendingAllReduce(engine, choice, operation, 4 * elements, 0.0)
        large: Any = Recorded.Large(self, elements)
        nothing: Any = None  # neither messages nor shared memory
        pending.messages_under_way(large, nothing, nothing, 0)
        return pending

    class Large:
        """A `PersistentLarge` that only records."""

        def __init__(self, by: Recorded, elements: int) -> None:
            self.finish: Any = lambda *_: by.said.append(f"finish {elements}")

    @contextlib.contextmanager
    def attributing_errors(self, label: str, begins: Operation | None = None) -> Iterator[None]:
        yield

    def choose(self, size_bytes: int, dtype: int, op: int) -> AlgorithmSpec:
        return AlgorithmSpec("ring")

    def begin_trial(self, elements: int, reduction: Any, choice: AlgorithmSpec) -> bool:
        if elements not in self.tried:
            return False
        while self.pending:
            self.pending[0].wait()
        self.said.append(f"try {elements}")
        return True

    def after(self, size_bytes: int, choice: AlgorithmSpec, seconds: float, dtype: int) -> None:
        self.said.append(f"after {size_bytes // 4}")


def between(recorded: Any) -> BetweenHosts:
    options = Options()
    assert not options.problem
    one = BetweenHosts(recorded, options)
    one.selector = recorded
    return one


def bucket(one: BetweenHosts, elements: int) -> PendingAllReduce | None:
    return one.start_storage(Flat(0, elements, FLOAT32, (elements,), None), None, scale=0.5, stamp_ns=0)


def test_a_trial_begins_when_what_is_open_is_recorded_and_is_done_at_once() -> None:
    recorded = Recorded({7})
    one = between(recorded)
    finish = bucket(one, 5)
    assert finish is not None
    assert bucket(one, 7) is None
    finish.wait()  # nothing is left of it
    assert recorded.said == [
        *("begin 5", "finish 5", "after 5"),
        *("try 7", "begin 7", "finish 7", "after 7"),
    ]


def test_what_is_decided_is_begun_before_the_one_before_it_is_finished() -> None:
    recorded = Recorded(set())
    one = between(recorded)
    finish = [bucket(one, 5), bucket(one, 6)]
    for each in finish:
        assert each is not None
        each.wait()
    assert recorded.said == ["begin 5", "begin 6", "finish 5", "after 5", "finish 6", "after 6"]


def test_a_run_is_told_what_buckets_go_by_once_it_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    session = SimpleNamespace(size=4, put_event=lambda *event: told.append(event))
    monkeypatch.setattr(sessions, "current", lambda: session)
    recorded: Any = Recorded(set())
    recorded.rank_map = SimpleNamespace(size=4)
    one = between(recorded)

    def go(name: str, times: int) -> None:
        recorded.choose = lambda *_: AlgorithmSpec(name, "hosts")
        for _ in range(times):
            started = bucket(one, 5)
            assert started is not None
            started.wait()

    for name in ("ring", "tree") * 3:  # on trial
        go(name, STEADY - 1)
    assert told == []
    go("ring", 2 * STEADY)
    assert told == [("carried", {"algorithm": "hosts/ring", "wire_dtype": "float32"})]
    go("tree", STEADY - 1)
    go("ring", STEADY)  # as before
    assert len(told) == 1
    session.size = 2  # of some ranks only
    go("tree", STEADY)
    assert len(told) == 1


def test_only_sums_of_float32_by_the_choice_whose_turn_it_is_are_tried() -> None:
    rows = tuple(TimingRow(name, 1.0, None, 1.0, True) for name in ("ring", "direct", "native"))
    selector, _ = on_threads(2, lambda across: Tuner(across, environ={}))
    turn, total = AlgorithmSpec("ring"), Reduction(FLOAT32, ReduceOp.sum)
    assert not selector.begin_trial(1, total, turn)
    selector.use(TimingTable({}, {}, (Rank(4, "ring", "", rows), Rank(MB, "ring", "", rows))).encode())
    turn, at = selector.choose(4), selector.size_class(4)
    assert not selector.is_trial_due(4)
    assert not selector.begin_trial(1, total, turn)
    selector.calls[at] = int(selector.trial_at[at])
    assert selector.is_trial_due(4)
    for dtype, op in ((FLOAT64, ReduceOp.sum), (FLOAT32, ReduceOp.max), (FLOAT32, ReduceOp.min)):
        assert not selector.is_trial_due(4, dtype, op)
        assert not selector.begin_trial(4 // ITEM_BYTES[dtype], Reduction(dtype, op), turn)
    assert not selector.begin_trial(1, total, AlgorithmSpec("tree")), "asked for by name"
    assert selector.begin_trial(1, total, turn)

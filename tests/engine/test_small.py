"""Small all-reduces that are ready beforehand: the same messages, the same bits, the same errors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from tests.support.thread_transport import Threads

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OP_CODES
from ringside.engine.net.context import EngineContext
from ringside.engine.net.exchange.exchange import Exchange, ExchangeRequest
from ringside.engine.net.exchange.persistent import PersistentExchange
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature, SignatureMismatch
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.persistent import MOST_BYTES, PersistentSmall
from ringside.engine.net.reduction import Reduction, make_fold
from ringside.schedule import by_name
from ringside.schedule.combine import relabel

from .oracle import elements
from .threaded import on_threads as engine_threads
from .transports.vertices import on_threads

F32, SUM = DTYPES.index("float32"), OP_CODES["sum"]
ALGORITHMS = ("parameter_server", "recursive_doubling", "one_shot", "tree", "chain")


def persistent_exchange(
    exchange: Exchange, name: str, x: Any, size: int, *, order: tuple[int, ...] = (), tag: int = 0
) -> PersistentExchange:
    schedule = by_name(name, size)
    plan = plan_messages(relabel(schedule, order) if order else schedule, exchange.transport.rank)
    chunk = x.view(np.uint8)
    assert PersistentExchange.fits(exchange, plan, len(chunk))
    fold = make_fold(F32, SUM)
    request = ExchangeRequest(plan, 4, fold, CollectiveSignature(1, F32, SUM, len(x), tag=tag))
    return PersistentExchange(exchange, request, chunk)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_script_and_the_interpreter_understand_each_other(name: str, size: int) -> None:
    """Some vertices go by a script and others do not, again and again, with one place per link."""

    def vertex(end: Threads) -> list[Any]:
        exchange = Exchange(end, segment_bytes=256, window=1)
        x, found = np.zeros(7, np.float32), []
        script = persistent_exchange(exchange, name, x, size)
        for turn in range(6):
            x[:] = elements("float32", 7, end.rank + turn)
            if (end.rank + turn) % 2:
                script.start()
                script.wait()
                script.release_buffers()
            else:
                plan = plan_messages(by_name(name, size), end.rank)
                call = CollectiveSignature(1, F32, SUM, 7)
                request = ExchangeRequest(plan, 4, make_fold(F32, SUM), call)
                ExchangeRun(exchange, request, [x.view(np.uint8)], ordered=True).run()
            found.append(x.copy())
        return [np.stack(found), dict(exchange.sent_bytes), len(exchange.hops)]

    results = on_threads(size, vertex)
    for got, _, _ in results[1:]:
        assert got.tobytes() == results[0][0].tobytes()
    with np.errstate(all="ignore"):
        for turn in range(6):
            want = np.sum([elements("float32", 7, rank + turn) for rank in range(size)], axis=0, dtype=np.float32)
            np.testing.assert_allclose(results[0][0][turn], want, rtol=1e-4, atol=1e-4)
    assert all(hops for _, sent, hops in results if sent)


def test_a_script_finds_who_called_something_else() -> None:
    def vertex(end: Threads) -> str:
        exchange = Exchange(end)
        x = np.zeros(3, np.float32)
        try:
            script = persistent_exchange(exchange, "one_shot", x, 3, tag=end.rank == 2)
            script.start()
            script.wait()
        except SignatureMismatch as error:
            return str(error.peer)
        return ""

    assert on_threads(3, vertex) == ["2", "2", "0"]


@pytest.mark.parametrize("name", [*ALGORITHMS, f"ranks/{NATIVE}", "ring", "direct"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_ready_or_not_the_bits_are_the_same(name: str, dtype: str) -> None:
    """What is ready beforehand, in turn with the interpreter: sums, averages and scales, sizes around the border."""
    code, item = DTYPES.index(dtype), ITEM_BYTES[DTYPES.index(dtype)]
    cases = [(count, op, 1.0) for count in (1, 33, MOST_BYTES // item, MOST_BYTES // item + 1) for op in ("sum", "avg")]
    cases += [(33, "sum", 0.5), (33, "avg", 3.0)] if dtype != "int64" else []

    def job(engine: HierarchicalEngine) -> list[bytes]:
        found = []
        for count, op, scale in cases:
            what = Reduction(code, OP_CODES[op], scale)
            for ready in (True, False, True):
                x = elements(dtype, count, engine.rank_map.rank)
                if ready:
                    engine.all_reduce(address_of(x), count, what, AlgorithmSpec.parse(name))
                else:
                    engine.start(address_of(x), count, what, AlgorithmSpec.parse(name)).wait()
                found.append(x.tobytes())
        return found

    results = engine_threads(4, job)
    assert all(result == results[0] for result in results)
    for at in range(0, len(results[0]), 3):
        assert len(set(results[0][at : at + 3])) == 1, cases[at // 3]


def test_of_many_kinds_the_old_ones_are_put_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [weakref.WeakSet[PersistentSmall]() for _ in range(4)], PersistentSmall.__init__

    def noted(self: PersistentSmall, context: EngineContext, *args: Any) -> None:
        made[context.rank_map.rank].add(self)
        make(self, context, *args)

    monkeypatch.setattr(PersistentSmall, "__init__", noted)

    def job(engine: HierarchicalEngine) -> bool:
        for count in (*range(1, 300), 5):
            x = np.full(count, engine.rank_map.rank + 1, np.float32)
            engine.all_reduce(address_of(x), count, Reduction(F32, SUM), AlgorithmSpec("parameter_server"))
            assert (x == 10).all()
        gc.collect()
        return 0 < len(made[engine.rank_map.rank]) < 299

    assert all(engine_threads(4, job))


class Noted:
    """A message that is sent, and whether it was waited for."""

    def __init__(self, message: Any) -> None:
        self._message, self.is_waited_for = message, False

    def wait(self) -> None:
        self.is_waited_for = True
        self._message.wait()


def test_what_is_put_away_has_sent_everything_before(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[Noted]] = [[], []]
    send = Threads.send

    def noted(self: Threads, peer: int, data: Any) -> Noted:
        sent[self.rank].append(Noted(send(self, peer, data)))
        return sent[self.rank][-1]

    def job(engine: HierarchicalEngine) -> None:
        for count in range(1, 258):
            x = np.full(count, engine.rank_map.rank + 1, np.float32)
            spec = AlgorithmSpec(NATIVE if count == 1 else "parameter_server")  # of which the first is not our message
            engine.all_reduce(address_of(x), count, Reduction(F32, SUM), spec)
            assert (x == 3).all()

    monkeypatch.setattr(Threads, "send", noted)
    engine_threads(2, job)
    for messages in sent:
        waited = [message.is_waited_for for message in messages]
        assert waited == [True] * (len(waited) - 1) + [False], "of all but the newest kind"


def test_what_failed_leaves_the_tensor_as_it_was() -> None:
    def job(engine: HierarchicalEngine) -> bool:
        x = np.full(4, 7.0, np.float32)
        if engine.rank_map.rank == 3:
            engine.close()
            return True
        with pytest.raises(Exception, match="rank 3"):
            engine.all_reduce(address_of(x), 4, Reduction(F32, SUM), AlgorithmSpec("parameter_server"))
        return bool((x == 7.0).all())

    assert all(engine_threads(4, job))

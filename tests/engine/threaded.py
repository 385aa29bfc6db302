"""Groups of threads that exchange messages, for tests of what goes on above a transport."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from tests.support.thread_transport import Switchboard, Threads, each_on_a_thread

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import Reduction


class NoNative:
    """Takes the place of a native all-reduce where nobody calls it."""

    def check(self, dtype, op):
        raise AssertionError("native was not to be called")

    def all_reduce(self, data, dtype, op, members):
        raise AssertionError("native was not to be called")

    def prepare(self, data, dtype, op, members):
        raise AssertionError("native was not to be called")

    def close(self):
        """Nobody needs it."""

    def abort(self):
        """Nothing is under way."""


class NativeByThreads:
    """Stands for the group's own all-reduce: a ring over a switchboard of its own, made slower on purpose."""

    def __init__(self, board: Switchboard, rank: int, pause_s: float = 0.0) -> None:
        self._engine = make_engine(board, rank)
        self._pause_s = pause_s

    def check(self, dtype, op):
        """It can do everything."""

    def close(self):
        self._engine.close()

    def abort(self):
        self._engine.close()

    def prepare(self, data, dtype, op, members):
        return functools.partial(self.all_reduce, data, dtype, op, members)

    def all_reduce(self, data, dtype, op, members):
        if self._pause_s:
            threading.Event().wait(self._pause_s)
        address = data.__array_interface__["data"][0]
        self._engine.all_reduce(address, len(data) // ITEM_BYTES[dtype], Reduction(dtype, op), AlgorithmSpec("ring"))


def make_engine(board: Switchboard, rank: int, native: Any = None, segment_bytes: int = 1 << 18) -> HierarchicalEngine:
    n = board.size
    rank_map = RankMap(rank, tuple((r,) for r in range(n)), tuple(f"host{r}" for r in range(n)), ("",) * n)
    exchange = Exchange(Threads(board, rank), segment_bytes=segment_bytes)
    return HierarchicalEngine(rank_map, exchange, None, native or NoNative(), timeout_s=board.timeout_s)


def on_threads(
    n: int, job: Callable[[HierarchicalEngine], Any], *, native_pause_s: float = 0.0, segment_bytes: int = 1 << 18
) -> list[Any]:
    """Run a job on n ranks, each a thread and a host of its own; return what each returned, by rank."""
    board, own = Switchboard(n), Switchboard(n)
    engines: dict[int, HierarchicalEngine] = {}

    def run(rank: int) -> Any:
        engines[rank] = make_engine(board, rank, NativeByThreads(own, rank, native_pause_s), segment_bytes)
        return job(engines[rank])

    return each_on_a_thread(n, run, lambda rank: engines[rank].close())

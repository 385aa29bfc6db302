"""The measuring loop of one rank: engines in turn, round after round, on the same buffers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside import _core
from ringside.bench.check import contribution, count_wrong, expected, fill
from ringside.bench.contender import Contender
from ringside.bench.messages import Limit, Sample
from ringside.bench.plan import Plan, storage_dtype, stride_of
from ringside.engine import Communicator

MAX_ITERATIONS = 20000
LIMIT_ROUNDS = 5
_LIMIT_PASSES = 3
_TOO_LONG = 3  # times what a turn should last
_SLOW_ROUNDS = 3  # enough where one all-reduce takes longer than a turn should

Array = NDArray[Any]


@dataclass
class _Turns:
    """A contender in one case: what it rotates through, what it measured."""

    contender: Contender
    handles: Iterator[Any]
    wrong: int
    estimate_s: float = 0.0
    iterations: int = 1
    seconds: list[float] = field(default_factory=list)

    def sample(self, cache: str, size_bytes: int, buffers: int) -> Sample:
        """Return what is reported of this case."""
        who = self.contender
        return Sample(
            who.engine,
            who.algorithm,
            who.tensor,
            cache,
            size_bytes,
            buffers,
            self.iterations,
            tuple(self.seconds),
            self.wrong,
        )


class Meter:
    """Measures cases (size × cache state) on this rank; every rank must ask for the same ones.

    Args:
        comm: Used for agreement and for barriers between turns.
        plan: What to measure.
        contenders: Engines, in the order they take turns.
    """

    def __init__(self, comm: Communicator, plan: Plan, contenders: Sequence[Contender]) -> None:
        self._comm, self._plan, self._contenders = comm, plan, contenders
        self._pools = {"symmetric": comm.empty(plan.pool_bytes, np.uint8), "private": aligned(plan.pool_bytes)}
        self._sweep = aligned(plan.limit_bytes)
        self._own = contribution(comm.rank, plan.ranks, plan.dtype, plan.op)
        self._expected = expected(plan.ranks, plan.dtype, plan.op)

    def case(self, size_bytes: int, cache: str, buffers: int) -> list[Sample]:
        """Measure every contender on one size and cache state."""
        turns = [self._prepare(contender, size_bytes, buffers) for contender in self._contenders]
        slow = max(turn.estimate_s for turn in turns) > self._plan.round_seconds
        for _ in range(min(_SLOW_ROUNDS, self._plan.rounds) if slow else self._plan.rounds):
            for turn in turns:
                if cache == "cold":
                    np.add(self._sweep, 1, out=self._sweep)  # the turn before may have left buffers in the cache
                self._take(turn)
        return [turn.sample(cache, size_bytes, buffers) for turn in turns]

    def limit(self) -> Limit:
        """Measure how fast all ranks together stream: two buffers read, two written past the caches."""
        size = self._plan.limit_bytes
        places = [aligned(size).ctypes for _ in range(4)]
        a, b, x, y = (place.data for place in places)
        stream_pair = _core.native().stream_pair
        seconds = []
        for _ in range(LIMIT_ROUNDS + 1):
            self._comm.barrier()
            start = time.perf_counter()
            for _ in range(_LIMIT_PASSES):
                stream_pair(a, b, x, y, size)
            self._comm.barrier()  # until the last rank is through: ranks that share a core run one after the other
            seconds.append((time.perf_counter() - start) / _LIMIT_PASSES)
        return Limit(size, tuple(seconds[1:]))

    def _prepare(self, contender: Contender, size_bytes: int, buffers: int) -> _Turns:
        """Check the contender's result on the last buffer, then estimate how long it takes."""
        arrays = self._arrays(contender.tensor, size_bytes, buffers)
        handles = [contender.wrap(array) for array in arrays]
        fill(arrays[-1], self._own)
        self._comm.barrier()
        contender.call(handles[-1])
        wrong = count_wrong(arrays[-1], self._expected)
        arrays[-1][...] = 0  # sums of sums would overflow; zeros stay zeros
        turns = _Turns(contender, itertools.cycle(handles), wrong)
        trials = 1 if size_bytes >= 4 << 20 else 5
        seconds = min(self._time(turns, 1) for _ in range(trials))
        turns.estimate_s = self._slowest(seconds)
        turns.iterations = self._iterations(turns.estimate_s)
        return turns

    def _arrays(self, tensor: str, size_bytes: int, buffers: int) -> list[Array]:
        stride = stride_of(size_bytes)
        pool, kind = self._pools[tensor], storage_dtype(self._plan.dtype)
        return [pool[at * stride : at * stride + size_bytes].view(kind) for at in range(buffers)]

    def _iterations(self, estimate_s: float) -> int:
        if self._plan.iterations:
            return self._plan.iterations
        fitting = int(self._plan.round_seconds / max(estimate_s, 1e-7))
        return max(1, min(MAX_ITERATIONS, fitting))

    def _take(self, turns: _Turns) -> None:
        """Take one turn; where it lasted much longer than it should, make the next one shorter."""
        seconds = self._time(turns, turns.iterations)
        turns.seconds.append(seconds / turns.iterations)
        slowest = self._slowest(seconds)
        if slowest > _TOO_LONG * self._plan.round_seconds:
            turns.iterations = self._iterations(slowest / turns.iterations)

    def _slowest(self, seconds: float) -> float:
        return float(self._comm.all_reduce(np.array([seconds]), "max")[0])

    def _time(self, turns: _Turns, count: int) -> float:
        call, handles = turns.contender.call, itertools.islice(turns.handles, count)
        self._comm.barrier()
        start = time.perf_counter()
        for handle in handles:
            call(handle)
        return time.perf_counter() - start


def aligned(size_bytes: int) -> Array:
    """Return zeroed bytes of this process that start at a cache line, every page taken."""
    raw = np.empty(size_bytes + 64, np.uint8)
    at = -raw.ctypes.data % 64
    array = raw[at : at + size_bytes]
    array[...] = 0
    return array

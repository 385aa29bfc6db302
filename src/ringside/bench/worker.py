"""One rank of the benchmark: `python -m ringside.bench.worker DIRECTORY`, started by `launch.py`.

The directory holds the plan and takes the rank's messages. RANK tells the rank, or what Open MPI's mpirun sets.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside import _core
from ringside.bench.messages import Begin, Done, Failed, Limit, Sample, Skipped, WorkerHello, Writer
from ringside.bench.peers import Contender, open_gloo, open_mpi, ours
from ringside.bench.plan import BenchPlan, storage_dtype, stride_of
from ringside.engine import HostCommunicator
from ringside.errors import SyncError
from ringside.processes import die_with_parent
from ringside.text import size

# -------------------------------------------------------------------------------------------------
# What an all-reduce must give, computed without any engine, and how many elements differ from it.
#
# Every rank's tensor repeats `PERIOD` random numbers of its own. The period is prime, so that an element taken from a
# wrong slice, segment or rank is seen. The numbers are small integers: every order of summation gives the same bits.

PERIOD = 65521
_CHUNK_ROWS = 64
# The largest integer up to which every integer is exact; sums are kept below it.
_EXACT = {"float16": 2048, "bfloat16": 256, "int8": 127, "uint8": 255}
_BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
_FOLDS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, **_BITWISE}


def expected(ranks: int, dtype: str, op: str) -> Array:
    """Return one period of the result on every rank, shape [PERIOD], in the dtype it is stored as."""
    wide = "int64" if "int" in dtype else "float64"
    stack = np.stack([whole_numbers(rank, ranks, dtype, op).astype(wide) for rank in range(ranks)])
    with np.errstate(over="ignore"):
        result: Array = _FOLDS[op].reduce(stack, axis=0)
    if op == "avg":
        result = np.trunc(result / ranks) if wide == "int64" else result / ranks
    return to_storage(result, dtype)


def to_storage(values: Array, dtype: str) -> Array:
    """Convert numbers to a dtype's storage; bfloat16 is rounded to nearest, ties to even."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return values.astype(storage_dtype(dtype))
        bits = values.astype(np.float32).view(np.uint32)
        rounded: Array = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).view(np.int16)


def fill(array: Array, period: Array) -> None:
    """Write a period again and again into a one-dimensional array."""
    rows = len(array) // PERIOD
    array[: rows * PERIOD].reshape(rows, PERIOD)[...] = period
    array[rows * PERIOD :] = period[: len(array) - rows * PERIOD]


def count_wrong(array: Array, period: Array) -> int:
    """Return how many elements of a one-dimensional array differ from the repeated period."""
    rows = len(array) // PERIOD
    table = array[: rows * PERIOD].reshape(rows, PERIOD)
    wrong = int(np.count_nonzero(array[rows * PERIOD :] != period[: len(array) - rows * PERIOD]))
    for first in range(0, rows, _CHUNK_ROWS):  # in pieces: the comparison of 256 MiB needs memory of its own
        wrong += int(np.count_nonzero(table[first : first + _CHUNK_ROWS] != period))
    return wrong


def whole_numbers(rank: int, ranks: int, dtype: str, op: str) -> Array:
    """Return the whole numbers, shape [PERIOD], of which a rank's tensor is made: their reduction is exact."""
    random = np.random.default_rng((rank, 20260101))
    if op == "prod":  # powers of two, few enough to stay finite in float16 for up to 64 ranks
        return np.where(random.integers(0, 8, PERIOD) == 0, 2, 1)
    top = 16
    if op in ("sum", "avg"):
        top = max(1, min(top, _EXACT.get(dtype, 1 << 20) // ranks))
    return random.integers(1, top + 1, PERIOD)


# -------------------------------------------------------------------------------------------------
# The measuring loop of one rank: engines in turn, round after round, on the same buffers.

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
        who, seconds = self.contender, tuple(self.seconds)
        return Sample(
            who.engine, who.algorithm, who.tensor, cache, size_bytes, buffers, self.iterations, seconds, self.wrong
        )


class BenchMeter:
    """Measures cases (size × cache state) on this rank; every rank must ask for the same ones.

    Args:
        comm: Used for agreement and for barriers between turns.
        plan: What to measure.
        contenders: Engines, in the order they take turns.

    Attributes:
        sweep: What is read and written before a cold turn, so that the caches hold nothing else.
    """

    def __init__(self, comm: HostCommunicator, plan: BenchPlan, contenders: Sequence[Contender]) -> None:
        self._comm, self._plan, self._contenders = comm, plan, contenders
        self._pools = {"symmetric": comm.empty(plan.pool_bytes, np.uint8), "private": aligned(plan.pool_bytes)}
        self.sweep = aligned(plan.limit_bytes)
        self._own = to_storage(whole_numbers(comm.rank, plan.ranks, plan.dtype, plan.op), plan.dtype)
        self._expected = expected(plan.ranks, plan.dtype, plan.op)

    def case(self, size_bytes: int, cache: str, buffers: int) -> list[Sample]:
        """Measure every contender on one size and cache state."""
        turns = [self._prepare(contender, size_bytes, buffers) for contender in self._contenders]
        slow = max(turn.estimate_s for turn in turns) > self._plan.round_seconds
        for _ in range(min(_SLOW_ROUNDS, self._plan.rounds) if slow else self._plan.rounds):
            for turn in turns:
                if cache == "cold":
                    np.add(self.sweep, 1, out=self.sweep)  # the turn before may have left buffers in the cache
                seconds = self._time(turn, turn.iterations)
                turn.seconds.append(seconds / turn.iterations)
                slowest = self._slowest(seconds)
                if slowest > _TOO_LONG * self._plan.round_seconds:  # the next one is shorter
                    turn.iterations = self._iterations(slowest / turn.iterations)
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
        stride = stride_of(size_bytes)
        pool, kind = self._pools[contender.tensor], storage_dtype(self._plan.dtype)
        arrays = [pool[i * stride : i * stride + size_bytes].view(kind) for i in range(buffers)]
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

    def _iterations(self, estimate_s: float) -> int:
        if self._plan.iterations:
            return self._plan.iterations
        fitting = int(self._plan.round_seconds / max(estimate_s, 1e-7))
        return max(1, min(MAX_ITERATIONS, fitting))

    def _slowest(self, seconds: float) -> float:
        """Return the most that any rank gives."""
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


PLAN = "plan.json"


def main(directory: Path) -> None:
    """Run this rank to its end; a failure is reported and ends the process at once."""
    die_with_parent()
    plan = msgspec.json.decode((directory / PLAN).read_bytes(), type=BenchPlan)
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["RANK"])
    writer = Writer(directory, rank)
    writer.send(WorkerHello(os.getpid()))
    try:
        with HostCommunicator(plan.key, rank, plan.ranks) as comm:
            peers = [peer for name in plan.peers if (peer := open_peer(name, plan, rank, directory, writer))]
            meter = BenchMeter(comm, plan, [*ours(comm, plan.dtype, plan.op, plan.algorithms), *peers])
            gc.disable()
            writer.send(Begin("the streaming limit", 0.0))
            writer.send(meter.limit())
            cases = [(each, *state) for each in plan.sizes_bytes for state in plan.states(each)]
            for number, (size_bytes, cache, buffers) in enumerate(cases):
                writer.send(Begin(f"{size(size_bytes, binary=True)}, {cache}", number / len(cases)))
                for sample in meter.case(size_bytes, cache, buffers):
                    writer.send(sample)
            writer.send(meter.limit())
            comm.barrier()
            for peer in peers:
                peer.close()
    except Exception as error:
        lost = error.ranks if isinstance(error, SyncError) else ()
        writer.send(Failed(type(error).__name__, str(error), lost))
        # Leaving Gloo or MPI politely would wait for the others, who may wait for this rank.
        os._exit(1)
    writer.send(Done())
    writer.close()


def open_peer(name: str, plan: BenchPlan, rank: int, directory: Path, writer: Writer) -> Contender | None:
    """Open a peer and try it on one element; report why it cannot do this dtype and reduction."""
    try:
        if name == "gloo":
            peer = open_gloo(rank, plan.ranks, plan.dtype, plan.op, directory)
        else:
            peer = open_mpi(plan.ranks, plan.dtype, plan.op)
        peer.call(peer.wrap(np.zeros(1, storage_dtype(plan.dtype))))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        writer.send(Skipped(name, f"{plan.op} of {plan.dtype}: {reason}"))
        return None
    return peer


if __name__ == "__main__":
    main(Path(sys.argv[1]))

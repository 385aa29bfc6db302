"""One rank of the benchmark: `python -m ringside.bench.worker DIRECTORY`, started by `launch.py`.

The directory holds the plan and takes the rank's messages. RANK tells the rank, or what an MPI's mpirun sets.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside import _core
from ringside.bench.messages import About, Begin, Done, Failed, Limit, Sample, Skipped, WorkerHello, Writer
from ringside.bench.peers import Contender, join_gloo, opener_of, ours
from ringside.bench.plan import BenchPlan, storage_dtype, stride_of
from ringside.engine import HostCommunicator, Settings
from ringside.engine.topology import read_cpus, spread
from ringside.errors import SyncError, UnsupportedError
from ringside.processes import die_with_parent
from ringside.text import size

# -------------------------------------------------------------------------------------------------
# What a collective must give, computed without any engine, and how many elements differ from it.
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


def results(collective: str, rank: int, count: int, own: Sequence[Array], reduced: Array) -> list[Array]:
    """Return what a collective leaves in a rank's result: of each of its equal parts one period, [PERIOD].

    Args:
        collective: Of `COLLECTIVES`, without an operation that is none of its own.
        rank: This rank; the root is 0.
        count: Elements of a part.
        own: Of each rank one period of its tensor.
        reduced: One period of their reduction.
    """
    if collective == "reduce_scatter":
        return [np.roll(reduced, -rank * count)]
    if collective == "all_to_all":
        return [np.roll(given, -rank * count) for given in own]
    if collective == "all_gather":
        return list(own)
    if collective == "broadcast":
        return [own[0]]
    return [own[rank] if collective == "reduce" and rank else reduced]


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
MAX_TIMED_CALLS = 1000  # one by one
BARRIER_LATE_S = 0.005  # by which one rank comes late to the barrier that is checked
LIMIT_ROUNDS = 5
_LIMIT_PASSES = 3
_TOO_LONG = 3  # times what a turn should last
_SLOW_ROUNDS = 3  # enough where one all-reduce takes longer than a turn should

Array = NDArray[Any]


@dataclass
class _Turns:
    """A contender in one case: what it rotates through, what it measured."""

    contender: Contender
    calls: Iterator[Callable[[], Any]]
    wrong: int
    estimate_s: float = 0.0
    iterations: int = 1
    seconds: list[float] = field(default_factory=list)
    single: tuple[float, float] = (0.0, 0.0)

    def sample(self, cache: str, size_bytes: int, buffers: int) -> Sample:
        """Return what is reported of this case."""
        who, seconds = self.contender, tuple(self.seconds)
        case = cache, size_bytes, buffers, self.iterations, seconds, self.wrong
        return Sample(who.engine, who.algorithm, who.tensor, *case, who.array, *self.single)


class BenchMeter:
    """Measures cases (size × cache state) on this rank; every rank must ask for the same ones.

    Args:
        comm: Used for agreement and for barriers between turns.
        plan: What to measure.
        contenders: Engines, in the order they take turns.
        report: Takes what begins now, in words.

    Attributes:
        sweep: What is read and written before a cold turn, so that the caches hold nothing else.
    """

    def __init__(
        self,
        comm: HostCommunicator,
        plan: BenchPlan,
        contenders: Sequence[Contender],
        report: Callable[[str], None] = lambda what: None,
    ) -> None:
        self._comm, self._plan, self._contenders, self._report = comm, plan, contenders, report
        self._pools = {"symmetric": comm.empty(plan.pool_bytes, np.uint8), "private": aligned(plan.pool_bytes)}
        self.sweep = aligned(plan.limit_bytes)
        numbers = (whole_numbers(rank, plan.ranks, plan.dtype, plan.op) for rank in range(plan.ranks))
        self._own = [to_storage(period, plan.dtype) for period in numbers]
        self._reduced = expected(plan.ranks, plan.dtype, plan.op)

    def case(self, size_bytes: int, cache: str, buffers: int) -> list[Sample]:
        """Measure every contender on one size and cache state."""
        turns = [self._prepare(contender, size_bytes, buffers) for contender in self._contenders]
        slow = max(turn.estimate_s for turn in turns) > self._plan.round_seconds
        for number in range(min(_SLOW_ROUNDS, self._plan.rounds) if slow else self._plan.rounds):
            for turn in reversed(turns) if number % 2 else turns:  # nobody always follows the same one
                self._report(turn.contender.engine)
                if cache == "cold":
                    np.add(self.sweep, 1, out=self.sweep)  # the turn before may have left buffers in the cache
                seconds = self._time(turn, turn.iterations)
                turn.seconds.append(seconds / turn.iterations)
                slowest = self._slowest(seconds)
                if slowest > _TOO_LONG * self._plan.round_seconds:  # the next one is shorter
                    turn.iterations = self._iterations(slowest / turn.iterations)
        for turn in turns:
            self._report(turn.contender.engine)
            turn.single = self._time_singly(turn, min(turn.iterations, MAX_TIMED_CALLS))
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
        """Check the contender's result on the last buffers, then estimate how long it takes."""
        self._report(contender.engine)
        pool, kind, at = self._pools[contender.tensor], storage_dtype(self._plan.dtype), 0
        calls: list[Callable[[], Any]] = []
        tensors: list[tuple[str, Array, Array]] = []
        for _ in range(buffers):
            each, tensors = [], []
            for collective, given, apart in self._plan.parts(size_bytes):
                x = pool[at : at + given].view(kind)
                at += stride_of(given)
                out = pool[at : at + apart].view(kind)
                at += stride_of(apart)
                tensors.append((collective, x, out))
                each.append(contender.calls[collective](contender.wrap(x), contender.wrap(out)))
            calls.append(each[0] if len(each) == 1 else partial(_call_all, each))
        for _, x, out in tensors:
            fill(x, self._own[self._comm.rank])
            out[...] = 0
        self._comm.barrier()
        if self._plan.collective == "barrier":
            wrong = self._check_barrier(calls[-1])
        else:
            calls[-1]()
            wrong = sum(self._count_wrong(contender.engine, *part) for part in tensors)
        for _, x, _ in tensors:
            x[...] = 0  # sums of sums would overflow; zeros stay zeros
        turns = _Turns(contender, itertools.cycle(calls), wrong)
        trials = 1 if size_bytes >= 4 << 20 else 5
        seconds = min(self._time(turns, 1) for _ in range(trials))
        turns.estimate_s = self._slowest(seconds)
        turns.iterations = self._iterations(turns.estimate_s)
        return turns

    def _count_wrong(self, engine: str, collective: str, x: Array, out: Array) -> int:
        """Return how many elements of a collective's result are wrong on this rank."""
        if collective == "reduce" and engine == "gloo" and self._comm.rank:
            return 0  # torch says nothing of the tensors of ranks that are not the root, and Gloo reduces in them
        result = out if collective in ("reduce_scatter", "all_gather", "all_to_all") else x
        rank, ranks = self._comm.rank, self._plan.ranks
        pieces = ranks if collective in ("all_gather", "all_to_all") else 1
        count = len(result) // pieces
        periods = results(collective, rank, count, self._own, self._reduced)
        return sum(count_wrong(result[i * count : (i + 1) * count], period) for i, period in enumerate(periods))

    def _check_barrier(self, barrier: Callable[[], Any]) -> int:
        """Return 1 if a barrier let this rank go before the last one came to it: each rank is last once."""
        early = 0
        for last in range(self._plan.ranks):
            self._comm.barrier()
            if self._comm.rank == last:
                time.sleep(BARRIER_LATE_S)
            entered = time.monotonic()
            barrier()
            left = time.monotonic()
            early |= left < self._slowest(entered)  # all ranks of a host share this clock
        return early

    def _iterations(self, estimate_s: float) -> int:
        if self._plan.iterations:
            return self._plan.iterations
        fitting = int(self._plan.round_seconds / max(estimate_s, 1e-7))
        return max(1, min(MAX_ITERATIONS, fitting))

    def _slowest(self, seconds: float) -> float:
        """Return the most that any rank gives."""
        return float(self._comm.all_reduce(np.array([seconds]), "max")[0])

    def _time(self, turns: _Turns, count: int) -> float:
        calls = itertools.islice(turns.calls, count)
        self._comm.barrier()
        start = time.perf_counter()
        for call in calls:
            call()
        return time.perf_counter() - start

    def _time_singly(self, turns: _Turns, count: int) -> tuple[float, float]:
        """Return the median and the 99th percentile of single calls, seconds."""
        calls, clock = itertools.islice(turns.calls, count), time.perf_counter
        self._comm.barrier()
        stamps = [clock()]
        for call in calls:
            call()
            stamps.append(clock())
        middle, late = np.percentile(np.diff(stamps), (50, 99))
        return float(middle), float(late)


def _call_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


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
    told = "PMI_RANK" if {"mpich", "impi"} & set(plan.peers) else "OMPI_COMM_WORLD_RANK"
    rank = int(os.environ.get(told) or os.environ["RANK"])
    writer, cores = Writer(directory, rank), spread(read_cpus(os.sched_getaffinity(0)))
    own = (cores[rank],) if plan.pin and plan.ranks <= len(cores) else ()
    writer.send(WorkerHello(os.getpid()))
    try:
        with _communicator(plan, rank, directory, own) as whole:
            comm: HostCommunicator = getattr(whole, "local", whole)
            contenders: list[Contender] = []
            for array in plan.arrays:
                contenders += ours(whole if array == "torch" else comm, plan, array)
            peers = [peer for name in plan.peers if (peer := open_peer(name, plan, comm, directory, writer))]
            if own:  # only now: threads that peers have of their own are left to the kernel
                os.sched_setaffinity(0, own)
            what, share = "the streaming limit", 0.0
            meter = BenchMeter(
                comm, plan, [*contenders, *peers], lambda engine: writer.send(Begin(f"{what}: {engine}", share))
            )
            gc.disable()
            writer.send(Begin(what, 0.0))
            writer.send(meter.limit())
            cases = [(each, *state) for each in plan.sizes_bytes for state in plan.states(each)]
            for number, (size_bytes, cache, buffers) in enumerate(cases):
                what, share = f"{size(size_bytes, binary=True)}, {cache}", number / len(cases)
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


def _communicator(plan: BenchPlan, rank: int, directory: Path, cpus: tuple[int, ...]) -> Any:
    """Return what users of torch tensors call, where there are any, else the host's communicator."""
    if "torch" not in plan.arrays:
        return HostCommunicator(plan.key, rank, plan.ranks, replace(Settings.of_environment(), cpus=cpus))
    import ringside

    join_gloo(rank, plan.ranks, directory)
    return ringside.communicator()


def open_peer(name: str, plan: BenchPlan, comm: HostCommunicator, directory: Path, writer: Writer) -> Contender | None:
    """Open a peer and try it on one element; report why it cannot do this collective, dtype and reduction."""
    try:
        peer = opener_of(name)(plan, comm, directory)
        missing = sorted({part for part, _, _ in plan.parts(0)} - set(peer.calls))
        if missing:
            raise UnsupportedError(f"it has no {', '.join(missing)}")
        if plan.collective == "all_reduce":
            nothing = peer.wrap(np.zeros(1, storage_dtype(plan.dtype)))
            peer.calls["all_reduce"](nothing, nothing)()
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        writer.send(Skipped(name, f"{plan.op} of {plan.dtype}: {reason}"))
        return None
    if peer.about:
        writer.send(About(name, peer.about))
    return replace(peer, engine=name)  # as it was asked for: the results are looked up by that


if __name__ == "__main__":
    main(Path(sys.argv[1]))

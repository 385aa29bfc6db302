"""How a case is measured: turns of fitting length, checked results, ended ranks in words; clocks are the tests' own."""

from __future__ import annotations

import functools
import itertools
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from ringside.bench import launch, peers, worker
from ringside.bench import worker as check
from ringside.bench import worker as measure
from ringside.bench.messages import About, Begin, Done, Failed, Message, Skipped, WorkerHello
from ringside.bench.peers import Contender
from ringside.bench.plan import COLLECTIVES, ITEM_BYTES, BenchPlan
from ringside.bench.worker import BenchMeter
from ringside.errors import RingsideError, UnsupportedError, UsageError

RIGHT = np.resize(check.expected(2, "float32", "sum"), 1 << 20)
OTHER = np.resize(check.whole_numbers(1, 2, "float32", "sum"), 1 << 20)


class Work:
    """Stands for the module `time`; it passes where a contender works."""

    def __init__(self) -> None:
        self.now = 5.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Alone:
    """Stands for a communicator of two ranks, of which the other takes `slower` times as long."""

    rank, size, slower = 0, 2, 1.0

    def __init__(self) -> None:
        self.barriers = 0

    def empty(self, size: int, dtype: Any) -> Any:
        return np.zeros(size, dtype)

    def barrier(self) -> None:
        self.barriers += 1

    def all_reduce(self, x: Any, op: str) -> Any:
        assert op == "max"
        return x * self.slower


class Engine:
    """A contender that takes known times, and adds the other rank's numbers to what it is given."""

    def __init__(self, clock: Work, *seconds: float, name: str = "ringside", tensor: str = "symmetric") -> None:
        self.clock, self.seconds = clock, list(seconds)
        self.given: list[Any] = []
        self.firsts: list[float] = []
        self.spoil = 0
        calls = {"all_reduce": lambda x, out: functools.partial(self.call, x)}
        self.contender = Contender(name, tensor, lambda array: array, calls)

    def call(self, array: Any) -> None:
        self.given.append(array)
        self.firsts.append(float(array[0]))
        self.clock.now += self.seconds[0] if len(self.seconds) == 1 else self.seconds.pop(0)
        array += OTHER[: len(array)]
        array[: self.spoil] += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Work:
    made = Work()
    monkeypatch.setattr(measure, "time", made)
    return made


def meter(*engines: Engine, comm: Alone | None = None, **asked: Any) -> BenchMeter:
    values = {"key": "test", "ranks": 2, "sizes_bytes": (4096,), "cache_bytes": 1 << 14, "rounds": 4, **asked}
    return BenchMeter(comm or Alone(), BenchPlan(**values), [engine.contender for engine in engines])  # type: ignore[arg-type]


def test_a_turn_has_as_many_calls_as_fit_and_engines_take_turns(clock: Work) -> None:
    comm = Alone()
    fast, slow = Engine(clock, 0.001), Engine(clock, 0.01, name="gloo", tensor="private")
    one, other = meter(fast, slow, comm=comm).case(4096, "warm", 1)
    assert (one.engine, one.algorithm, one.tensor, one.cache, one.size_bytes, one.buffers) == (
        "ringside", "auto", "symmetric", "warm", 4096, 1,
    )  # fmt: skip
    assert (other.engine, other.tensor) == ("gloo", "private")
    assert (one.iterations, other.iterations) == (pytest.approx(50, abs=1), pytest.approx(5, abs=1))
    assert one.seconds == pytest.approx((0.001,) * 4)
    assert other.seconds == pytest.approx((0.01,) * 4)
    assert (one.wrong, other.wrong) == (0, 0)
    assert comm.barriers == 2 * (1 + 5 + 4 + 1)
    assert len(fast.given) == 1 + 5 + (4 + 1) * one.iterations
    assert (other.median_s, other.late_s) == (pytest.approx(0.01), pytest.approx(0.01))


def test_nobody_always_follows_the_same_one(clock: Work) -> None:
    told: list[str] = []
    contenders = [Engine(clock, 0.001, name=name).contender for name in ("ringside", "gloo")]
    plan = BenchPlan(key="test", ranks=2, sizes_bytes=(4096,), cache_bytes=1 << 14, rounds=4)
    BenchMeter(Alone(), plan, contenders, told.append).case(4096, "warm", 1)  # type: ignore[arg-type]
    there, back = ["ringside", "gloo"], ["gloo", "ringside"]
    assert told[-10:] == [*there, *back, *there, *back, *there]


def test_how_many_calls_is_what_was_asked_for_or_within_bounds(clock: Work) -> None:
    for seconds, iterations, expected in (
        (0.001, 7, 7),
        (1e-9, 0, 20_000),
        (1e-3, 0, 49),
        (0.04, 0, 1),
    ):
        (sample,) = meter(Engine(clock, seconds), rounds=1, iterations=iterations).case(64, "warm", 1)
        assert sample.iterations == pytest.approx(expected, abs=1 if expected == 49 else 0)


def test_the_slowest_rank_says_how_long_it_takes(clock: Work) -> None:
    comm = Alone()
    comm.slower = 10.0
    (sample,) = meter(Engine(clock, 0.001), comm=comm, rounds=1).case(64, "warm", 1)
    assert sample.iterations == pytest.approx(5, abs=1)
    assert sample.seconds == pytest.approx((0.001,))


def test_where_one_call_takes_longer_than_a_turn_three_rounds_do(clock: Work) -> None:
    engines = Engine(clock, 0.001), Engine(clock, 0.2)
    for rounds, taken in ((5, 3), (2, 2)):
        for sample in meter(*engines, rounds=rounds).case(64, "warm", 1):
            assert len(sample.seconds) == taken
    (sample,) = meter(Engine(clock, 0.0499), rounds=5).case(64, "warm", 1)
    assert len(sample.seconds) == 5


def test_a_turn_that_lasted_too_long_makes_the_next_one_shorter(clock: Work) -> None:
    engine = Engine(clock, *[0.001] * 6, *[0.01] * 50, 0.01)
    (sample,) = meter(engine, rounds=3).case(64, "warm", 1)
    assert sample.iterations == pytest.approx(5, abs=1)
    assert sample.seconds == pytest.approx((0.01,) * 3)
    engine = Engine(clock, *[0.001] * 6, *[0.0029] * 500, 0.0029)
    (sample,) = meter(engine, rounds=3).case(64, "warm", 1)
    assert sample.iterations == pytest.approx(50, abs=1)


def test_the_fastest_of_a_few_trials_counts_and_one_where_it_is_large(clock: Work) -> None:
    engine = Engine(clock, 9.0, 9.0, 9.0, 0.01, 9.0, 9.0, 0.01)
    (sample,) = meter(engine, rounds=1).case((4 << 20) - 64, "warm", 1)
    assert sample.iterations == pytest.approx(5, abs=1)
    large = {"sizes_bytes": (4 << 20,), "rounds": 1}
    (sample,) = meter(Engine(clock, 9.0, 0.01, 0.001), **large).case(4 << 20, "any", 1)
    assert sample.iterations == pytest.approx(5, abs=1)


def test_buffers_are_rotated_and_lie_apart_and_wrong_elements_are_counted(clock: Work) -> None:
    engine = Engine(clock, 0.001)
    engine.spoil = 3
    (sample,) = meter(engine, iterations=3, rounds=2, sizes_bytes=(100,)).case(100, "cold", 3)
    assert sample.wrong == 3
    places = [array.ctypes.data for array in engine.given]
    begins = sorted(set(places))
    assert [b - a for a, b in itertools.pairwise(begins)] == [128, 128]
    assert all(array.nbytes == 100 for array in engine.given)
    order = [begins.index(place) for place in places]
    assert order[0] == 2  # the last one is checked
    assert order[1:] == [number % 3 for number in range(5 + 3 * 3)]


def test_what_is_checked_is_this_ranks_and_what_is_timed_begins_at_zero(clock: Work) -> None:
    engine = Engine(clock, 0.001)
    meter(engine, rounds=1, iterations=1).case(64, "warm", 1)
    own, other = check.whole_numbers(0, 2, "float32", "sum")[0], OTHER[0]
    assert engine.firsts == [own, *(number * other for number in range(5 + 2))]


def test_between_cold_turns_the_cache_is_swept(clock: Work) -> None:
    for cache, swept in (("warm", 0), ("cold", 4)):
        made = meter(Engine(clock, 0.001), Engine(clock, 0.001), rounds=2, iterations=1)
        made.case(64, cache, 1)
        assert set(made.sweep[[0, -1]]) == {swept}
    assert made.sweep.nbytes == 4 << 20


def test_the_streaming_limit_is_the_mean_of_a_few_passes_without_the_first_round(
    clock: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[Any] = []

    def stream_pair(*given: int) -> None:
        passes.append(given)
        clock.now += 0.5 if len(passes) <= 3 else 0.25

    monkeypatch.setattr(measure._core, "native", lambda: SimpleNamespace(stream_pair=stream_pair))
    comm = Alone()
    limit = meter(comm=comm).limit()
    assert limit.size_bytes == 4 << 20
    assert limit.seconds == pytest.approx((0.25,) * 5)
    assert len(passes) == 3 * (5 + 1)
    assert comm.barriers == 2 * (5 + 1)
    *places, size = passes[0]
    assert size == 4 << 20
    assert len(set(places)) == 4
    assert all(place % 64 == 0 for place in places)


def test_memory_begins_at_a_cache_line() -> None:
    for size in (1, 63, 64, 4097):
        array = measure.aligned(size)
        assert array.ctypes.data % 64 == 0
        assert (len(array), array.any()) == (size, False)


# ------------------------------------------------------------------------------------------------ what it must give


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max", "band", "bor", "bxor"])
def test_the_expected_result_is_that_of_the_contributions(ranks: int, op: str) -> None:
    parts = [check.whole_numbers(rank, ranks, "int64", op).tolist() for rank in range(ranks)]
    fold = {
        "sum": sum, "avg": lambda column: sum(column) // ranks, "prod": np.prod, "min": min, "max": max,
        "band": np.bitwise_and.reduce, "bor": np.bitwise_or.reduce, "bxor": np.bitwise_xor.reduce,
    }[op]  # fmt: skip
    assert check.expected(ranks, "int64", op)[:500].tolist() == [fold(c) for c in list(zip(*parts, strict=True))[:500]]


@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_numbers_differ_as_much_as_their_sum_stays_exact(dtype: str) -> None:
    most = {"int8": 127, "uint8": 255, "bfloat16": 256, "float16": 2048}.get(dtype, 1 << 20)
    for ranks, op, top in (
        (2, "sum", 16),
        (2, "max", 16),
        (64, "max", 16),
        (64, "sum", max(1, min(16, most // 64))),
        (200, "sum", None),
    ):
        numbers = check.whole_numbers(0, ranks, dtype, op)
        assert numbers.min() == 1
        assert numbers.max() == (top or max(1, min(16, most // 200)))
    assert set(check.whole_numbers(0, 64, dtype, "prod")) == {1, 2}
    assert np.mean(check.whole_numbers(0, 64, dtype, "prod") == 2) == pytest.approx(1 / 8, abs=0.01)


def test_numbers_repeat_after_a_prime_which_no_slice_is_a_multiple_of() -> None:
    assert check.PERIOD > 1 << 15
    assert all(check.PERIOD % factor for factor in range(2, 1 << 9))


def test_a_mean_of_whole_numbers_is_cut_and_one_of_others_is_not() -> None:
    total = check.expected(3, "float64", "sum")
    np.testing.assert_array_equal(check.expected(3, "float64", "avg"), total / 3)
    np.testing.assert_array_equal(check.expected(3, "int32", "avg"), (total // 3).astype("int32"))


def test_what_is_wrong_is_counted_over_many_periods() -> None:
    period = check.to_storage(check.whole_numbers(0, 1, "uint8", "sum"), "uint8")
    array = np.empty(130 * check.PERIOD + 5, np.uint8)
    check.fill(array, period)
    assert check.count_wrong(array, period) == 0
    array[[0, 64 * check.PERIOD, 65 * check.PERIOD - 1, 129 * check.PERIOD, -1]] += 1
    assert check.count_wrong(array, period) == 5
    short = np.empty(7, np.uint8)
    check.fill(short, period)
    assert short.tolist() == period[:7].tolist()


# ------------------------------------------------------------------------------------------------ ranks that end


def told(*reports: list[Message], log: str = "", returned: tuple[int | None, ...] = ()) -> str:
    processes: Any = [SimpleNamespace(returncode=status) for status in returned or (0,) * len(reports)]
    ranks = launch.BenchRanks([], processes)
    ranks.reports = list(reports)
    return ranks.what_happened(log)


def test_what_happened_is_told_of_the_cause_and_not_of_what_follows() -> None:
    measuring: list[Message] = [WorkerHello(1), Begin("4 B", 0.0), Begin("8 B", 0.5)]
    assert told([*measuring], [WorkerHello(2)], returned=(1, -9)) == (
        "rank 1 died (SIGKILL) while joining the others; the other ranks were ended"
    )
    assert told([], [], returned=(-77, None)) == (
        "rank 0 died (signal 77) before it started; the other ranks were ended"
    )
    lost, cause = Failed("PeerLostError", "rank 1 left", (1,)), Failed("ValueError", "no")
    assert told([*measuring, lost], [*measuring, cause]) == "rank 1 failed while measuring 8 B: ValueError: no"
    assert told([*measuring, lost], [*measuring]) == "rank 0 failed while measuring 8 B: PeerLostError: rank 1 left"
    assert told([Done()], [WorkerHello(2)], log="first\n\nlast\n \n") == (
        "rank 1 ended while joining the others; its last words: last"
    )
    assert told([], [Done()]) == "rank 0 ended before it started; its last words: none"
    mpirun = "mpirun noticed that process rank 1 with PID 0 on node here exited on signal 11"
    assert told(measuring, measuring, log=mpirun, returned=(139,)) == (
        "rank 1 died (SIGSEGV) while measuring 8 B; the other ranks were ended"
    )
    assert told(measuring, returned=(-9,)).startswith("rank 0 ended while measuring 8 B")  # mpirun itself, of one rank


class Child:
    """A process of whose end the test decides."""

    def __init__(self, *polls: int | None) -> None:
        self.polls = list(polls)

    def poll(self) -> int | None:
        return self.polls.pop(0) if len(self.polls) > 1 else self.polls[0]


def test_who_is_left_is_asked_to_end_and_then_killed() -> None:
    commands = (["true"], ["sleep", "60"], ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"])
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) for command in commands
    ]
    children[0].wait()
    assert children[2].stdout is not None
    assert children[2].stdout.readline() == "ready\n"
    closed: list[str] = []
    reader: Any = SimpleNamespace(close=lambda: closed.append("closed"))
    launch.BenchRanks([reader], children).end()
    assert closed == ["closed"]
    assert [child.returncode for child in children] == [0, -signal.SIGTERM, -signal.SIGKILL]
    for child in children:
        assert child.stdout is not None
        child.stdout.close()


def test_after_a_failure_the_others_have_the_time_to_say_what_they_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(launch, "time", SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)))  # fmt: skip
    seen: list[Any] = []
    reader: Any = SimpleNamespace(read=lambda: [WorkerHello(len(seen))])

    def ranks_of(*children: Any) -> launch.BenchRanks:
        return launch.BenchRanks([reader] * len(children), list(children))

    ranks = ranks_of(Child(None, 0), Child(0))
    ranks.follow(lambda rank, message: seen.append((rank, message)))
    assert [rank for rank, _ in seen] == [0, 1] * 2
    assert [len(report) for report in ranks.reports] == [2, 2]
    assert now[0] == pytest.approx(100.1)
    ranks_of(Child(*[None] * 80, 0)).follow(lambda *_: None)
    assert now[0] == pytest.approx(100.1 + 8.0)  # while nobody has failed, ranks take as long as they take
    now[0] = 100.1
    ranks_of(Child(None), Child(None, None, 1)).follow(lambda *_: None)
    assert now[0] == pytest.approx(100.1 + 0.2 + 3.0, abs=0.15)


def test_a_rank_starts_with_one_thread_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for given, expected in ((None, "1 7"), ("5", "5 7")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        script = f"(echo $OMP_NUM_THREADS $RANK; ps -o sid= -p $$) > {tmp_path}/told; echo $$ >&2; exit 1"
        monkeypatch.setattr(launch, "rank_commands", lambda *_, s=script: [(["sh", "-c", s], {"RANK": "7"})])
        with pytest.raises(RingsideError, match="its last words") as failure:
            launch.run_ranks(BenchPlan(key="test", ranks=1, sizes_bytes=(4,)))
        told, session = (tmp_path / "told").read_text().splitlines()
        assert (told, int(session)) == (expected, int(str(failure.value).rpartition(" ")[-1]))


def test_open_mpi_starts_as_root_only_where_it_is_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = BenchPlan(key="test", ranks=3, sizes_bytes=(4,), peers=("mpi",))
    for user, flags in ((0, ["--allow-run-as-root"]), (1000, [])):
        monkeypatch.setattr(launch.os, "geteuid", lambda user=user: user)
        ((command, environ),) = launch.rank_commands(asked, tmp_path)
        assert [Path(command[0]).name, *command[1 : 1 + len(flags)]] == ["mpirun", *flags]
        assert command[1 + len(flags) : 6 + len(flags)] == ["--oversubscribe", "--bind-to", "none", "-n", "3"]
        assert command[-1] == str(tmp_path)
        assert environ == dict.fromkeys((peers.MPI_MEMORY, peers.MPI_4_MEMORY), f"/dev/shm/{tmp_path.name}")


def test_a_peer_that_cannot_is_skipped_with_the_first_line_of_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[Message] = []
    writer: Any = SimpleNamespace(send=sent.append)
    asked = BenchPlan(key="test", ranks=2, sizes_bytes=(4,), dtype="bfloat16", op="max")

    def cannot(*_: Any) -> Any:
        raise RingsideError("\nno such thing\nat all")

    comm: Any = Alone()
    monkeypatch.setattr(worker, "opener_of", lambda name: cannot)
    assert worker.open_peer("gloo", asked, comm, tmp_path, writer) is None
    assert sent == [Skipped("gloo", "max of bfloat16: no such thing")]
    tried: list[Any] = []
    calls = {"all_reduce": lambda x, out: functools.partial(tried.append, x)}
    peer = Contender("mpi", "private", lambda array: array, calls, about="version 3")
    monkeypatch.setattr(worker, "opener_of", lambda name: lambda *_: peer)
    assert worker.open_peer("mpi", asked, comm, tmp_path, writer) == replace(peer, engine="mpi")
    assert [(array.dtype, array.tolist()) for array in tried] == [(np.dtype("int16"), [0])]
    assert sent[1:] == [About("mpi", "version 3")]
    other = msgspec.structs.replace(asked, collective="fsdp2")
    assert worker.open_peer("mpi", other, comm, tmp_path, writer) is None
    assert sent[-1] == Skipped("mpi", "max of bfloat16: it has no all_gather, reduce_scatter")


def test_our_engine_is_called_as_users_call_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[dict[str, Any]] = []
    comm: Any = SimpleNamespace(all_reduce=lambda array, **how: given.append(how))
    for op, auto in (("sum", {}), ("max", {"op": "max"})):
        made = peers.ours(comm, BenchPlan(key="", ranks=2, sizes_bytes=(4,), op=op, algorithms=("auto", "ring")))
        assert [(one.engine, one.algorithm, one.tensor) for one in made] == [
            ("ringside", algorithm, tensor) for algorithm in ("auto", "ring") for tensor in ("symmetric", "private")
        ]
        given.clear()
        for one in made:
            one.calls["all_reduce"](one.wrap(np.zeros(1)), None)()
        assert given == [auto, auto, *[{"op": op, "algorithm": "ring"}] * 2]
    monkeypatch.setattr(peers, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None)))
    with pytest.raises(UsageError, match="bfloat16 tensors need torch"):
        peers.ours(comm, BenchPlan(key="", ranks=2, sizes_bytes=(4,), dtype="bfloat16"))


def test_gloo_is_called_as_users_call_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    joined: list[Any] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *what, **how: joined.append((what, how)))
    comm: Any = SimpleNamespace(rank=1, size=3)

    def opened(dtype: str, op: str) -> Contender:
        asked = BenchPlan(key="", ranks=3, sizes_bytes=(4,), dtype=dtype, op=op)
        return peers.opener_of("gloo")(asked, comm, tmp_path)

    plain = opened("float32", "sum")
    ((what, how),) = joined
    assert (what, how["rank"], how["world_size"]) == (("gloo",), 1, 3)
    assert how["init_method"] == f"file://{tmp_path}/gloo-store"
    assert (plain.engine, plain.tensor, plain.array) == ("gloo", "private", "torch")
    call: Any = plain.calls["all_reduce"](1, 2)
    assert (call.func, call.args, call.keywords) == (torch.distributed.all_reduce, (1,), {})
    ops = torch.distributed.ReduceOp
    for op, asked in (("prod", ops.PRODUCT), ("max", ops.MAX)):
        call = opened("float32", op).calls["reduce_scatter"](1, 2)
        assert (call.args, call.keywords) == ((2, 1), {"op": asked})
    memory = np.array([0x3F80, 0x4000], np.int16)
    assert opened("bfloat16", "sum").wrap(memory).tolist() == [1.0, 2.0]


def test_open_mpi_reduces_in_place_and_refuses_what_it_has_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    steps: list[Any] = []
    world = SimpleNamespace(
        Get_size=lambda: 2, Barrier=lambda: steps.append("barrier"),
        **{name: lambda *given, name=name: steps.append((name, *given))
           for name in ("Allreduce", "Reduce_scatter_block", "Allgather", "Bcast", "Reduce", "Alltoall")},
    )  # fmt: skip
    mpi = SimpleNamespace(COMM_WORLD=world, IN_PLACE="in place", FLOAT="float", MAX="max")
    package = SimpleNamespace(rc=SimpleNamespace(threads=True), MPI=mpi)
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    memory = tmp_path / "memory"
    (memory / "segment").mkdir(parents=True)
    monkeypatch.setenv(peers.MPI_MEMORY, str(memory))
    comm: Any = SimpleNamespace(rank=1, size=2)

    def opened(ranks: int, dtype: str, op: str) -> Contender:
        asked = BenchPlan(key="", ranks=ranks, sizes_bytes=(4,), dtype=dtype, op=op, peers=("mpich",))
        return peers.opener_of("mpi")(asked, comm, tmp_path)

    peer = opened(2, "float32", "max")
    assert package.rc.threads is False
    assert (steps, memory.exists()) == (["barrier"], False)  # all have mapped it by then
    steps.clear()
    x, out = ["x", "float"], ["out", "float"]
    for make in peer.calls.values():
        make("x", "out")()
    assert steps == [
        ("Allreduce", "in place", x, "max"), ("Reduce_scatter_block", x, out, "max"), ("Allgather", x, out),
        ("Bcast", x, 0), ("Reduce", x, None, "max", 0), ("Alltoall", x, out), "barrier",
    ]  # fmt: skip
    for asked, why in (
        ((3, "float32", "max"), "MPI sees 2 ranks instead of 3"),
        ((2, "bfloat16", "max"), "no max of bfloat16"),
        ((2, "float32", "avg"), "no avg of float32"),
    ):
        with pytest.raises(UnsupportedError, match=why):
            opened(*asked)


def test_why_a_peer_cannot_take_part_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"torch", "mpi4py"}
    found = SimpleNamespace(find_spec=lambda name: name if name in there else None)
    monkeypatch.setattr(peers, "importlib", SimpleNamespace(util=found))
    monkeypatch.setattr(peers, "find_mpirun", lambda *_: "mpirun")
    for said, why in (
        ("mpirun (Open MPI) 5.0.8\n", ""),
        ("mpirun (OpenRTE) 4.1.4\n", ""),
        ("HYDRA build details:\nVersion 4\n", "mpirun is not Open MPI's (HYDRA build details:)"),
    ):
        done = SimpleNamespace(stdout=said, stderr="")
        monkeypatch.setattr(peers.subprocess, "run", lambda *words, done=done, **how: done)
        assert peers.why_not("mpi") == why
    monkeypatch.setattr(peers, "find_mpirun", lambda *_: None)
    assert peers.why_not("mpi").startswith("mpirun is not installed")
    assert peers.why_not("gloo") == ""
    there.clear()
    assert peers.why_not("mpi").startswith("mpi4py is not installed")
    assert peers.why_not("gloo") == "torch is not installed"
    there.add("torch")
    for peer in ("vllm", "deepspeed", "mpich", "impi", "openmpi-sm"):
        assert peers.why_not(peer, "nowhere").startswith("not in nowhere: bench/peers.sh")
    assert peers.why_not("some.module:opens") == ""


def test_each_mpi_is_started_with_its_own_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("openmpi", "mpich", "impi"):
        program = tmp_path / name / "bin" / "mpirun"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh")
        program.chmod(0o755)
    monkeypatch.setattr(peers, "usable_cores", lambda: 2)
    place = str(tmp_path)
    command, variables = peers.mpi_command("openmpi-sm", place, 2)
    assert (command[0], variables["OMPI_MCA_coll_sm_priority"]) == (f"{place}/openmpi/bin/mpirun", "100")
    assert peers.mpi_command("mpich", place, 2) == ([f"{place}/mpich/bin/mpirun", "-n", "2"], {})
    assert peers.mpi_command("mpich", place, 3)[1]["MPIR_CVAR_POLLS_BEFORE_YIELD"] == "1"
    variables = peers.mpi_command("impi", place, 2)[1]
    assert (variables["I_MPI_FABRICS"], variables["I_MPI_ROOT"]) == ("shm", f"{place}/impi")
    asked = BenchPlan(key="", ranks=2, sizes_bytes=(4,), peers=("impi",), environments=place)
    ((command, _),) = launch.rank_commands(asked, tmp_path)
    assert command[:4] == [f"{place}/impi/bin/mpirun", "-n", "2", f"{place}/impi/bin/python"]
    told = peers.about_mpi("impi", asked, "Intel MPI 7\n")
    assert told.startswith("Intel MPI 7; shm fabric alone; single copy by ")
    assert told.endswith("; I_MPI_FABRICS=shm, I_MPI_PIN=off")


@pytest.mark.parametrize(("scope", "permits"), [(None, True), ("0", True), ("1", False)])
@pytest.mark.parametrize("has_cma", [True, False])
def test_an_mpi_copies_once_where_it_was_built_to_and_the_kernel_permits_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str | None, permits: bool, has_cma: bool
) -> None:
    told = {
        "mpich/bin/mpichversion": "MPICH Device:    ch4:ofi",
        "mpich/bin/mpivars": f"MPIR_CVAR_CH4_CMA_ENABLE        ={int(has_cma)}",
        "openmpi/bin/ompi_info": "MCA btl: sm (MCA v2)\nMCA smsc: xpmem (MCA v2)"
        + "\nMCA smsc: cma (MCA v2)" * has_cma,
    }
    for name in ("mpich/bin/mpirun", "impi/bin/mpirun", "openmpi/bin/mpirun", *told):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\ncat <<END\n{told.get(name, '')}\nEND\n")
        program.chmod(0o755)
    monkeypatch.setattr(peers, "PTRACE_SCOPE", tmp_path / "ptrace_scope")
    if scope is not None:
        (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    plan = BenchPlan(key="", ranks=2, sizes_bytes=(4,), environments=str(tmp_path))
    parts = {peer: peers.about_mpi(peer, plan, "1.0").split("; ")[1:3] for peer in ("mpich", "openmpi", "impi")}
    by = {True: "single copy by CMA", False: "single copy by nothing"}
    assert parts == {
        "mpich": ["device ch4:ofi", by[permits and has_cma]],
        "openmpi": ["btl sm", "smsc xpmem" + " cma" * has_cma],
        "impi": ["shm fabric alone", by[permits]],
    }
    assert by[permits and has_cma] in peers.about_mpi("openmpi", plan, "1.0").split("; ")


def test_every_collective_is_checked(clock: Work) -> None:
    """The other rank is played: what it would have given is written by hand, right and then wrong in one element."""
    ranks, count = 2, 6
    whole = [np.resize(check.whole_numbers(rank, ranks, "float32", "sum"), 2 * count) for rank in range(ranks)]
    total, half = whole[0] + whole[1], count

    def plays(collective: str, x: Any, out: Any, spoil: float) -> None:
        right = {
            "all_reduce": (x, total), "reduce": (x, total), "broadcast": (x, whole[0]),
            "reduce_scatter": (out, total[:half]), "all_to_all": (out, np.concatenate([w[:half] for w in whole])),
            "all_gather": (out, np.concatenate([w[:half] for w in whole])),
        }[collective]  # fmt: skip
        right[0][...] = right[1]
        right[0][-1] += spoil

    for collective in COLLECTIVES[:-1]:
        for spoil in (0.0, 1.0):
            calls = {collective: lambda x, out, c=collective, s=spoil: lambda: plays(c, x, out, s)}
            contender = Contender("fake", "private", lambda array: array, calls)
            asked = BenchPlan(key="", ranks=2, sizes_bytes=(48,), cache_bytes=1 << 14, rounds=1, collective=collective)
            (sample,) = BenchMeter(Alone(), asked, [contender]).case(48, "warm", 1)  # type: ignore[arg-type]
            assert (collective, sample.wrong) == (collective, int(spoil))


@pytest.mark.parametrize(("engine", "wrong"), [("gloo", 0), ("fake", 6)])
def test_what_gloo_leaves_in_ranks_that_are_not_the_root_is_not_checked(clock: Work, engine: str, wrong: int) -> None:
    comm = Alone()
    comm.rank = 1
    contender = Contender(engine, "private", lambda array: array, {"reduce": lambda x, out: partial(x.fill, -1)})
    asked = BenchPlan(key="", ranks=2, sizes_bytes=(24,), cache_bytes=1 << 14, rounds=1, collective="reduce")
    (sample,) = BenchMeter(comm, asked, [contender]).case(24, "warm", 1)  # type: ignore[arg-type]
    assert sample.wrong == wrong


def test_a_step_is_its_collectives_one_after_the_other() -> None:
    def parts(collective: str, size: int) -> list[tuple[str, int, int]]:
        return BenchPlan(key="", ranks=2, sizes_bytes=(size,), collective=collective).parts(size)

    megabyte = 1 << 20
    assert [size for _, size, _ in parts("ddp", 30 * megabyte)] == [megabyte, 25 * megabyte, 4 * megabyte]
    assert parts("tensor_parallel", 64) == [("all_reduce", 64, 0)] * 4
    assert parts("fsdp2", 64) == [("all_gather", 8, 16)] * 8 + [("reduce_scatter", 16, 8)] * 4
    assert parts("all_to_all", 64) == [("all_to_all", 64, 64)]
    assert parts("barrier", 0) == [("barrier", 0, 0)]


@pytest.mark.parametrize("early", [0.0, 0.5])
def test_a_barrier_that_lets_a_rank_go_early_is_wrong(clock: Work, early: float) -> None:
    comm = Alone()
    comm.all_reduce = lambda x, op: x + early  # type: ignore[method-assign]
    contender = Contender("fake", "private", lambda array: array, {"barrier": lambda x, out: lambda: None})
    asked = BenchPlan(key="", ranks=2, sizes_bytes=(0,), cache_bytes=1 << 14, rounds=1, collective="barrier")
    (sample,) = BenchMeter(comm, asked, [contender]).case(0, "warm", 1)  # type: ignore[arg-type]
    assert sample.wrong == int(early > 0)

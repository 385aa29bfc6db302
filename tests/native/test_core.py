"""What ranks do in the core together: odd sizes, arguments, the log, watched processes, and who is named."""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.support.collective_log import drain
from tests.support.waiting import until

from ringside import _core
from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.shm.log import PATHS, CollectiveLog, Totals
from ringside.engine.shm.program import compile_schedule
from ringside.schedule import ALGORITHMS, Schedule, by_name

from .cores import (
    AUTOMATIC,
    CLOSED,
    DEADLINE,
    DIRECT,
    MISMATCH,
    NO_WEIGHT,
    OK,
    ONE_SHOT,
    PEER_LOST,
    PROGRAM,
    UNSUITED,
    WAIT_S,
    address,
    all_reduce,
    collective,
    opened,
    paths,
    together,
)

pytestmark = pytest.mark.native

LINE = 64  # bytes of a cache line


def numbers(ranks: int, count: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    """Small whole numbers, so that sums are exact in any order."""
    rng = np.random.default_rng((ranks, count, seed))
    return [rng.integers(0, 9, count).astype(dtype) for _ in range(ranks)]


# ------------------------------------------------------------------------------------------------ odd sizes


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_segments_of_any_size_and_a_stage_that_holds_them_just_so(ranks: int) -> None:
    """What goes beyond a segment would be in the next one, or in the next rank's."""
    for segment_bytes, dtype in (
        (LINE, "float64"),
        (100, "int32"),
        (130, "int64"),
        (LINE + 1, "int8"),
        (191, "float32"),
    ):
        stage_bytes = 3 * LINE * -(-segment_bytes // LINE)
        with opened(ranks, stage_bytes=stage_bytes, segment_bytes=segment_bytes) as cores:
            for count in (0, 1, 2, 9, 100, 211, 500):
                given = numbers(ranks, count, dtype)
                xs = [x.copy() for x in given]
                assert (
                    together([partial(all_reduce, core, x) for core, x in zip(cores, xs, strict=True)]) == [OK] * ranks
                )
                for x in xs:
                    np.testing.assert_array_equal(x, sum(given))
            assert paths(cores[0]) == ["staged"] * 7


def lanes_of(ranks: int, per_rank: int, which: int) -> list[int]:
    """Bounds of lanes: equal ones, some without elements, or all in one."""
    sizes = [[per_rank] * ranks, [per_rank * (rank % 3) for rank in range(ranks)], [0] * ranks][which]
    if which == 2:
        sizes[ranks // 2] = per_rank
    return [2, *np.cumsum(sizes) + 2]


@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_lanes_of_any_size_through_the_least_stage(ranks: int, one_shot_bytes: int) -> None:
    for dtype, segment_bytes in (("float64", LINE), ("int8", 100), ("int32", 3 * LINE), ("int16", LINE * ranks)):
        stage_bytes = 3 * LINE * -(-segment_bytes // LINE)
        options = {"stage_bytes": stage_bytes, "segment_bytes": segment_bytes, "one_shot_bytes": one_shot_bytes}
        with opened(ranks, **options) as cores:
            for per_rank in (1, 5, 8, 70):
                for which in range(3):
                    check_lanes(cores, dtype, lanes_of(ranks, per_rank, which), per_rank)


def check_lanes(cores: list[Any], dtype: str, bounds: list[int], root: int) -> None:
    """Hold every collective over lanes against what NumPy says; outside of the lanes nothing is written."""
    ranks, count = len(cores), bounds[-1] + 3
    given = numbers(ranks, count, dtype)
    root %= ranks
    own = [slice(a, b) for a, b in pairwise(bounds)]
    lengths = [b - a for a, b in pairwise(bounds)]

    def both(kind: str, xs: list[np.ndarray], outs: list[np.ndarray] | None = None, **how: Any) -> None:
        calls = [
            partial(collective, core, kind, x, bounds, out=None if outs is None else outs[rank], count=count, **how)
            for rank, (core, x) in enumerate(zip(cores, xs, strict=True))
        ]
        assert together(calls) == [OK] * ranks, kind

    def blank() -> list[np.ndarray]:
        return [np.full(count, 77, dtype) for _ in range(ranks)]

    total = sum(given)
    xs = [x.copy() for x in given]
    both("reduce_scatter_", xs)
    for rank, x in enumerate(xs):
        want = given[rank].copy()
        want[own[rank]] = total[own[rank]]
        np.testing.assert_array_equal(x, want)

    xs = [x.copy() for x in given]
    both("all_gather_", xs)
    for rank, x in enumerate(xs):
        want = given[rank].copy()
        for peer in range(ranks):
            want[own[peer]] = given[peer][own[peer]]
        np.testing.assert_array_equal(x, want)

    outs = blank()
    both("reduce_scatter", given, outs)
    for rank, out in enumerate(outs):
        np.testing.assert_array_equal(out[: lengths[rank]], total[own[rank]])
        assert (out[lengths[rank] :] == 77).all()

    lanes = [x[part].copy() for x, part in zip(given, own, strict=True)]
    for kind, of_root in (("all_gather", -1), ("gather", root)):
        outs = blank()
        both(kind, lanes, outs, root=of_root)
        for rank, out in enumerate(outs):
            want = np.full(count, 77, dtype)
            for peer in range(ranks) if of_root in (-1, rank) else ():
                want[own[peer]] = lanes[peer]
            np.testing.assert_array_equal(out, want, kind)

    outs = blank()
    both("scatter", given, outs, root=root)
    for rank, out in enumerate(outs):
        np.testing.assert_array_equal(out[: lengths[rank]], given[root][own[rank]])
        assert (out[lengths[rank] :] == 77).all()

    if len(set(lengths)) == 1:
        outs = blank()
        both("all_to_all", given, outs)
        for rank, out in enumerate(outs):
            want = np.full(count, 77, dtype)
            for peer in range(ranks):
                want[own[peer]] = given[peer][own[rank]]
            np.testing.assert_array_equal(out, want)


def add_schedule(core: Any, schedule: Schedule, rank: int) -> int:
    """Return the number by which a rank's communicator knows a schedule."""
    checksum, rows = compile_schedule(schedule, rank)
    number: int = core.add_program(checksum, schedule.rounds, schedule.chunks, rows)
    return number


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_programs_whose_work_space_holds_a_part_only(ranks: int) -> None:
    """Even where not a cache line of each chunk fits."""
    for name in ("ring", "tree", "halving_doubling", "direct"):
        schedule = by_name(name, ranks)
        for lines in (1, 2, 3, ranks, 4 * ranks):
            with opened(ranks, stage_bytes=3 * LINE * lines, segment_bytes=LINE) as cores:
                ways = [add_schedule(core, schedule, rank) for rank, core in enumerate(cores)]
                for dtype, count in (("float64", 1), ("float64", 24 * lines), ("float32", 333), ("int8", 1000)):
                    given = numbers(ranks, count, dtype)
                    xs = [x.copy() for x in given]
                    calls = [
                        partial(all_reduce, core, x, way=PROGRAM, program=way)
                        for core, x, way in zip(cores, xs, ways, strict=True)
                    ]
                    assert together(calls) == [OK] * ranks
                    for x in xs:
                        np.testing.assert_array_equal(x, sum(given).astype(dtype))
                assert paths(cores[0]) == ["program"] * 4


def test_what_travels_with_the_flag_goes_in_pieces_where_it_is_too_long() -> None:
    room = _core.native().INLINE_BYTES
    with opened(2, one_shot_bytes=room) as cores:
        for dtype in ("float64", "int8"):
            item = np.dtype(dtype).itemsize
            for count, meetings in ((0, 1), (room // item, 1), (room // item + 1, 2), (3 * room // item, 3)):
                given, before = numbers(2, count, dtype), cores[0].seq()
                xs = [x.copy() for x in given]
                assert (
                    together([partial(all_reduce, c, x, way=ONE_SHOT) for c, x in zip(cores, xs, strict=True)])
                    == [OK] * 2
                )
                for x in xs:
                    np.testing.assert_array_equal(x, sum(given))
                assert cores[0].seq() - before == meetings
        for count, path in ((room // 4, "one_shot"), (room // 4 + 1, "staged")):
            xs = numbers(2, count, "float32")
            paths(cores[0])
            assert (
                together([partial(all_reduce, c, x, way=AUTOMATIC) for c, x in zip(cores, xs, strict=True)]) == [OK] * 2
            )
            assert paths(cores[0]) == [path]


@pytest.mark.parametrize("ranks", [2, 7, 9])  # of 7 they fill a cache line
def test_of_lanes_the_bounds_travel_with_the_flag_too(ranks: int) -> None:
    room = _core.native().INLINE_BYTES - LINE * -(-8 * (ranks + 1) // LINE)
    with opened(ranks, one_shot_bytes=1 << 20, segment_bytes=4096) as cores:
        for count, path in ((room, "one_shot"), (room + 1, "staged")):
            check_lanes(cores, "int8", [0, *range(count - ranks - 2, count - 2)], 1)
            assert set(paths(cores[0])) == {path}


# ------------------------------------------------------------------------------------------------ arguments


def test_an_arena_of_another_shape_is_refused() -> None:
    native = _core.native()
    fd = native.create_arena(2, 8192)
    other = os.memfd_create("test-of-ringside", os.MFD_ALLOW_SEALING)
    size = os.fstat(fd).st_size
    rest = {"rank": 0, "pidfds": [-1, -1], "patience": (0, 0), "background": (0, 0), "timeout_s": 1.0}
    rest |= {"one_shot_bytes": 0, "segment_bytes": 4096, "stream_bytes": 1}
    try:
        for ranks, stage_bytes in ((1, 8192), (2, 4096)):
            with pytest.raises(RuntimeError, match="another version"):
                native.open_communicator(arena_fd=fd, stage_bytes=stage_bytes, ranks=ranks, **rest)
        with pytest.raises(OSError, match="arena"):
            native.open_communicator(arena_fd=fd, stage_bytes=size, ranks=2, **rest)
        os.ftruncate(other, size)
        with pytest.raises(OSError, match="arena"):
            native.open_communicator(arena_fd=other, stage_bytes=8192, ranks=2, **rest)  # it could shrink
        fcntl.fcntl(other, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(RuntimeError, match="another version"):
            native.open_communicator(arena_fd=other, stage_bytes=8192, ranks=2, **rest)  # all zeros
        for at in (0, 8, 12, 16):  # magic, version, ranks, bytes of stage
            os.pwrite(other, os.pread(fd, 4096, 0), 0)
            os.pwrite(other, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)
            with pytest.raises(RuntimeError, match="another version"):
                native.open_communicator(arena_fd=other, stage_bytes=8192, ranks=2, **rest)
    finally:
        os.close(fd)
        os.close(other)


def test_bounds_that_cannot_be_are_refused_before_anything_is_sent() -> None:
    with opened(2) as (core, _):
        x = np.zeros(10, np.float32)
        for bounds in ([0, 5, 4], [-1, 5, 10], [0, 5, 11]):
            with pytest.raises(ValueError, match="ascend"):
                collective(core, "reduce_scatter_", x, bounds)
        for bounds in ([0, 10], [0, 5, 10, 10]):
            with pytest.raises(ValueError, match="one bound more"):
                collective(core, "reduce_scatter_", x, bounds)
        assert core.seq() == 0


def test_what_kernels_cannot_do_is_refused() -> None:
    native = _core.native()
    x = np.ones(4, np.float32)
    at = [address(x)]
    known = [(dtype, op) for dtype in range(-2, 20) for op in range(-2, 20) if native.can_fold(dtype, op)]
    assert {dtype for dtype, _ in known} == set(range(len(DTYPES)))
    assert {op for _, op in known} == set(OP_CODES.values())
    for dtype, op in ((-1, 0), (len(DTYPES), 0), (0, -1), (0, len(OP_CODES)), (0, OP_CODES["band"])):
        with pytest.raises(ValueError, match="no kernel"):
            native.fold(at, at, 4, dtype, op)
    for scales in ([], [2.0]):
        native.fold(at, at, 4, 0, 0, scales=scales)
    assert (x == 2).all()
    with pytest.raises(ValueError, match="one scale"):
        native.fold(at, at, 4, 0, 0, scales=[1.0, 2.0])
    with pytest.raises(ValueError, match="cannot run"):
        native.fold(at, at, 4, 0, 0, isa="none")


def test_where_something_lies_is_told_if_it_can_be_written_as_it_is() -> None:
    native = _core.native()
    x, raw = np.arange(6.0), bytearray(8)
    assert native.writable_buffer(x) == address(x)
    assert native.writable_buffer(raw) == address(np.frombuffer(raw, np.uint8))
    raw.append(0)  # which it may: nobody holds it
    fixed = np.ones(4)
    fixed.flags.writeable = False
    for other in (fixed, np.ones((4, 4))[:, ::2], b"text", "text"):
        assert native.writable_buffer(other) == 0


def test_an_array_takes_the_short_way_if_the_kernels_know_its_elements() -> None:
    with opened(1) as (core,):
        for dtype in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "longlong", "long", "intc"):
            assert core.all_reduce_array(np.ones((2, 3), dtype), 0, 0, -1) == OK, dtype
        for dtype in ("u2", "u4", "u8", "bool", "c8", "S1", "g", "i4,i4"):
            assert core.all_reduce_array(np.ones((2, 3)).astype(dtype), 0, 0, -1) == UNSUITED, dtype
        raw = np.ones(36, np.uint8)
        assert core.all_reduce_array(raw[4:36].view(np.float32), 0, 0, -1) == OK
        assert core.all_reduce_array(raw[1:33].view(np.float32), 0, 0, -1) == UNSUITED, "not at a multiple of its size"
        assert core.all_reduce_array(np.ones((4, 4))[:, ::2], 0, 0, -1) == UNSUITED
        fixed = np.ones(4)
        fixed.flags.writeable = False
        assert core.all_reduce_array(fixed, 0, 0, -1) == UNSUITED
        assert core.all_reduce_array("text", 0, 0, -1) == UNSUITED
        assert CollectiveLog(core).totals().payload_bytes == 6 * (2 + 4 + 8 + 1 + 2 + 4 + 8 + 1 + 8 + 8 + 4) + 32


def test_arrays_are_told_apart_by_their_elements_and_shapes() -> None:
    def differ(one: np.ndarray, other: np.ndarray) -> list[tuple[Any, ...]]:
        with opened(2, one_shot_bytes=1 << 12) as cores:
            calls = [partial(core.all_reduce_array, x, 0, 0, -1) for core, x in zip(cores, (one, other), strict=True)]
            assert together(calls) == [MISMATCH] * 2
            failures = [core.failure() for core in cores]
            assert failures[0]["calls"] == failures[1]["calls"]
            assert failures[0]["ranks"] == failures[1]["ranks"] == [0, 1], "nobody is in the majority"
            assert (failures[0]["seq"], failures[0]["waited_s"], failures[0]["missing"]) == (1, 0.0, [])
            assert together([partial(core.all_reduce_array, one.copy(), 0, 0, -1) for core in cores]) == [OK] * 2
            return failures[0]["calls"]

    calls = differ(np.ones((2, 3)), np.ones((3, 2)))
    assert [call[6] for call in calls] == [(2, 3), (3, 2)]
    kinds = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1")
    for one, other in pairwise(kinds):
        calls = differ(np.ones(4, one), np.ones(4, other))
        assert [DTYPES[call[1]] for call in calls] == [str(np.dtype(one)), str(np.dtype(other))]
    calls = differ(np.ones((1,) * 32), np.ones((1,) * 31 + (2,)))
    assert [len(call[6]) for call in calls] == [32, 32]


USUAL: dict[str, Any] = {"kind": "reduce_scatter", "bounds": [0, 2, 4, 6], "op": "sum", "scale": 1.0}


@pytest.mark.parametrize(
    "odd",
    [
        {"kind": "reduce_scatter_"},
        {"bounds": [0, 2, 5, 6]},
        {"bounds": [1, 2, 4, 6]},
        {"bounds": [0, 2, 4, 5]},
        {"op": "max"},
        {"scale": 2.0},
        {"own_scale": True},
        {"root": 0},
        {"root": 1},
        {"count": 7},
        {"dtype": "int32"},
    ],
)
@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 12])
def test_calls_are_told_apart_by_all_that_must_be_equal(odd: dict[str, Any], one_shot_bytes: int) -> None:
    """Rank 1 calls something else; it is named, nothing is written, and the next call goes well."""
    with opened(3, one_shot_bytes=one_shot_bytes) as cores:
        xs, outs = [np.arange(9, dtype="f4") for _ in cores], [np.zeros(9, "f4") for _ in cores]

        def calls(odd: dict[str, Any]) -> list[int]:
            jobs = []
            for rank, core in enumerate(cores):
                how = USUAL | {"count": 6} | (odd if rank == 1 else {})
                x = xs[rank].view(how.pop("dtype", "f4"))
                out = None if how["kind"].endswith("_") else outs[rank]
                jobs.append(partial(collective, core, how.pop("kind"), x, how.pop("bounds"), out=out, **how))
            return together(jobs)

        assert calls(odd) == [MISMATCH] * 3
        assert [core.failure()["ranks"] for core in cores] == [[1]] * 3
        assert all((x == np.arange(9)).all() for x in xs)
        assert not np.any(outs)
        assert calls({}) == [OK] * 3
        assert [out[:2].tolist() for out in outs] == [[0, 3], [6, 9], [12, 15]]


@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 12])
def test_own_scales_may_differ_and_roots_must_be_the_same_for_all_that_have_one(one_shot_bytes: int) -> None:
    with opened(3, one_shot_bytes=one_shot_bytes) as cores:
        xs = [np.ones(4, "f4") for _ in cores]
        calls = [
            partial(collective, core, "all_reduce", x, [], scale=float(rank + 1), own_scale=True)
            for rank, (core, x) in enumerate(zip(cores, xs, strict=True))
        ]
        assert together(calls) == [OK] * 3
        assert all((x == 6).all() for x in xs)
        for roots, statuses in (
            ((2, 2, 2), [OK] * 3),
            ((0, 0, 0), [OK] * 3),
            ((2, 2, 1), [MISMATCH] * 3),
            ((0, 1, 2), [MISMATCH] * 3),
        ):
            xs = [np.full(4, rank + 1, "f4") for rank in range(3)]
            jobs = [
                partial(collective, core, "reduce", x, [], root=root)
                for core, x, root in zip(cores, xs, roots, strict=True)
            ]
            assert together(jobs) == statuses
            if statuses[0] == OK:
                assert [x[0] for x in xs] == [6 if rank == roots[0] else rank + 1 for rank in range(3)]
            else:
                assert cores[0].failure()["ranks"] == ([2] if roots[1] == 2 else [0, 1, 2])
                assert [call[7] for call in cores[0].failure()["calls"]] == list(roots)


def test_what_is_posted_fits_beside_the_flag() -> None:
    room = _core.native().INLINE_BYTES
    with opened(2) as cores:
        code, op = DTYPES.index("float64"), 0
        too_long, fits = np.ones(room // 8 + 1), [np.ones(room // 8) for _ in cores]
        with pytest.raises(ValueError, match="too large"):
            cores[0].post(address(too_long), too_long.size, code, op, 1.0, too_long.shape)
        for core, x in zip(cores, fits, strict=True):
            assert core.post(address(x), x.size, code, op, 1.0, x.shape) == OK
        for core, x in zip(cores, fits, strict=True):
            assert core.finish_posted() == OK
            assert (x == 2).all()


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_mean_over_no_weight_is_refused_whatever_way_it_goes(ranks: int) -> None:
    bounds = [0] + [4] * ranks
    for one_shot_bytes in (0, 1 << 12):
        with opened(ranks, one_shot_bytes=one_shot_bytes) as cores:
            for weight in (0.0, -1.0, float("nan")):
                for kind in ("all_reduce", "reduce_scatter_", "reduce_scatter"):
                    xs, outs = numbers(ranks, 4, "float32"), numbers(ranks, 4, "float32", 1)
                    kept = [x.copy() for x in (*xs, *outs)]
                    calls = [
                        partial(
                            collective,
                            core,
                            kind,
                            x,
                            [] if kind == "all_reduce" else bounds,
                            op="avg",
                            scale=weight,
                            own_scale=True,
                            out=out if kind == "reduce_scatter" else None,
                        )
                        for core, x, out in zip(cores, xs, outs, strict=True)
                    ]
                    assert together(calls) == [NO_WEIGHT] * ranks, (kind, weight)
                    for x, was in zip((*xs, *outs), kept, strict=True):
                        np.testing.assert_array_equal(x, was)
                    assert {core.failure()["status"] for core in cores} == {NO_WEIGHT}
            xs = [np.full(4, rank, np.float32) for rank in range(ranks)]
            calls = [
                partial(collective, core, "all_reduce", x, [], op="avg", scale=float(rank), own_scale=True)
                for rank, (core, x) in enumerate(zip(cores, xs, strict=True))
            ]
            assert together(calls) == [NO_WEIGHT if ranks == 1 else OK] * ranks
            if ranks == 3:
                assert all((x == np.float32(5 / 3)).all() for x in xs)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 12])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter_", "reduce_scatter"])
def test_weights_that_are_small_together_are_weights(ranks: int, one_shot_bytes: int, kind: str) -> None:
    bounds = [] if kind == "all_reduce" else [0] + [4] * ranks
    xs, out = [np.full(4, rank, np.float32) for rank in range(ranks)], np.zeros(4, np.float32)
    own = {"op": "avg", "scale": 0.125, "own_scale": True, "out": out if kind == "reduce_scatter" else None}
    with opened(ranks, one_shot_bytes=one_shot_bytes) as cores:
        calls = [partial(collective, core, kind, x, bounds, **own) for core, x in zip(cores, xs, strict=True)]
        assert together(calls) == [OK] * ranks
    np.testing.assert_array_equal(out if kind == "reduce_scatter" else xs[0], np.full(4, ranks // 2, np.float32))


# ------------------------------------------------------------------------------------------------ the log


def test_the_sums_of_the_log_are_exact() -> None:
    """Rank 1 was ready two seconds after rank 0, as both say."""
    late, early = 3_000_000_000, 5_000_000_000
    with opened(2, one_shot_bytes=64) as cores:
        now = _core.native().now_ns()
        stamps = [now - early, now - late]

        def call(count: int) -> None:
            xs = numbers(2, count, "float32")
            calls = [
                partial(all_reduce, c, x, way=AUTOMATIC, stamp_ns=s) for c, x, s in zip(cores, xs, stamps, strict=True)
            ]
            assert together(calls) == [OK] * 2

        for count in (1, 16, 17):
            call(count)
        first, second = (CollectiveLog(core).totals() for core in cores)
        assert first.collectives == second.collectives == 3
        assert first.payload_bytes == second.payload_bytes == 4 * 34
        assert first.by_path == second.by_path
        assert dict(zip(PATHS, first.by_path, strict=True)) == dict.fromkeys(PATHS, 0) | {"one_shot": 2, "staged": 1}
        assert (first.last_wait_ns, second.last_wait_ns) == (early - late, 0)
        assert first.sync_ns - first.wire_ns == 3 * (early - late)
        assert second.sync_ns == second.wire_ns > 3 * late
        call(5)
        rows = [drain(core) for core in cores]
        for rank, (row,) in enumerate(rows):
            assert row.arrivals == tuple(stamps)
            assert (row.seq, row.payload_bytes, row.submitted) == (4, 20, stamps[rank])
            assert row.submitted < row.entered <= row.ready <= row.done
            assert row.wait_seconds == pytest.approx(0.0 if rank else 2.0)
        assert CollectiveLog(cores[0]).totals() == Totals(0, 0, 0, 0, 0, [0] * len(PATHS))


def test_who_does_not_say_when_it_was_ready_was_so_when_it_came() -> None:
    def calls(core: Any, x: np.ndarray, out: np.ndarray) -> None:
        code = DTYPES.index(str(x.dtype))
        assert all_reduce(core, x) == OK
        assert core.all_reduce_array(x, 0, AUTOMATIC, -1) == OK
        assert core.post(address(x), x.size, code, 0, 1.0, x.shape) == core.finish_posted() == OK
        assert core.post_all_gather(address(x), address(out), x.size, code) == core.finish_posted() == OK
        assert core.barrier() == OK

    for ranks in (1, 2):
        with opened(ranks, one_shot_bytes=1 << 12) as cores:
            xs, outs = numbers(ranks, 9, "float32"), numbers(ranks, 18, "float32")
            together([partial(calls, *each) for each in zip(cores, xs, outs, strict=True)])
            for rank, core in enumerate(cores):
                rows = drain(core)
                assert len(rows) == 5
                assert [row.submitted for row in rows] == [row.entered for row in rows]
                assert [row.arrivals[rank] for row in rows] == [row.entered for row in rows]


def test_a_barrier_is_in_the_log_without_bytes_and_agreeing_on_memory_is_not() -> None:
    with opened(2) as cores:
        xs = numbers(2, 9, "float32")
        assert together([partial(all_reduce, core, x) for core, x in zip(cores, xs, strict=True)]) == [OK] * 2
        assert together([partial(core.agree_on_empty, 4096, 0, (1024,)) for core in cores]) == [OK] * 2
        assert together([core.barrier for core in cores]) == [OK] * 2
        for core in cores:
            rows = [(row.seq, PATHS[row.path], row.payload_bytes) for row in drain(core)]
            assert rows == [(1, "staged", 36), (3, "barrier", 0)]
        differ = [
            partial(core.agree_on_empty, 4096, 0, shape) for core, shape in zip(cores, [(1024,), (32, 32)], strict=True)
        ]
        assert together(differ) == [MISMATCH] * 2
        differ = [partial(core.agree_on_empty, 4096, dtype, (1024,)) for core, dtype in zip(cores, (0, 7), strict=True)]
        assert together(differ) == [MISMATCH] * 2
        assert together([cores[0].barrier, partial(cores[1].agree_on_empty, 0, 0, ())]) == [MISMATCH] * 2


def test_the_log_keeps_the_oldest_and_counts_what_it_has_no_room_for() -> None:
    for ranks in (1, 2):
        with opened(ranks, one_shot_bytes=64) as cores:
            xs = numbers(ranks, 1, "float32")

            def many(core: Any, x: np.ndarray) -> None:
                for _ in range(4099):
                    assert core.all_reduce_array(x, 0, ONE_SHOT, -1) == OK

            together([partial(many, core, x) for core, x in zip(cores, xs, strict=True)])
            assert [core.dropped_rows() for core in cores] == [3] * ranks
            assert [one.seq for one in drain(cores[0])] == list(range(1, 4097))
            together([partial(core.all_reduce_array, x, 0, ONE_SHOT, -1) for core, x in zip(cores, xs, strict=True)])
            assert [one.seq for one in drain(cores[0])] == [4100]


# ------------------------------------------------------------------------------------------------ watched processes


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_one_descriptor_watches_a_process_for_all_who_do() -> None:
    fds = [os.pidfd_open(os.getpid()) for _ in range(4)]
    with opened(1, pidfds=fds[:1]) as first:
        with opened(1, pidfds=fds[1:2]) as second, opened(2, pidfds=fds[2:]) as third:
            assert [core.pidfds() for core in (*first, *second)] == [fds[:1], fds[:1]]
            assert third[0].pidfds() == fds[:1] * 2
            assert [is_open(fd) for fd in fds] == [True, False, False, False]
        assert is_open(fds[0])
    assert not is_open(fds[0])


def test_processes_that_have_ended_are_not_taken_for_one_another() -> None:
    fds = []
    for _ in range(2):
        process = subprocess.Popen(["true"])
        fds.append(os.pidfd_open(process.pid))
        process.wait()
    with opened(1, pidfds=fds[:1]) as first:
        with opened(1, pidfds=fds[1:]) as second:
            assert [core.pidfds() for core in (*first, *second)] == [fds[:1], fds[1:]]
        assert [is_open(fd) for fd in fds] == [True, False]
    assert not is_open(fds[0])


# ------------------------------------------------------------------------------------------------ who is named


def test_who_has_not_arrived_is_told_while_one_waits() -> None:
    with opened(4) as cores:
        xs = numbers(4, 9, "float32")
        for _ in range(2):  # arrivals take turns
            threads = []
            for rank in (2, 0):
                threads.append(threading.Thread(target=all_reduce, args=(cores[rank], xs[rank])))
                threads[-1].start()
                until(
                    lambda rank=rank: (
                        cores[1].absent() == [] and cores[rank].absent() == ([0, 1, 3] if rank else [1, 3])
                    )
                )
            assert cores[2].absent() == [1, 3]
            together([partial(all_reduce, cores[rank], xs[rank]) for rank in (1, 3)])
            for thread in threads:
                thread.join(WAIT_S)
            assert all(core.absent() == [] for core in cores)


NEVER = (0, 1)  # a (rank, round) of rank 0's that it comes to after the others would have to


def test_those_who_have_done_least_are_late_not_those_who_wait_for_them() -> None:
    """Ranks 1 and 3 are held up in round 0, rank 2 waits for rank 1, and rank 0 for rank 2; rank 4 is through."""
    waits: list[list[tuple[Any, ...]]] = [
        # (round, chunk, overwrite, scratch, sources, stored, fetched)
        [(0, 0, False, False, [0], [(4, 1), (2, 0)], []), (1, 0, False, False, [0], [(2, 1)], [])],
        [(0, 0, False, False, [1], [NEVER], [])],
        [(1, 0, False, False, [2], [(1, 0)], [])],
        [(0, 0, False, False, [3], [NEVER], [])],
        [],
    ]
    with opened(5, timeouts_s=[0.5, *[10 * WAIT_S] * 4]) as cores:
        for core, rows in zip(cores, waits, strict=True):
            assert core.add_program(7, 2, 1, rows) == 0
        xs = numbers(5, 3, "float32")
        calls = [partial(all_reduce, core, x, way=PROGRAM, program=0) for core, x in zip(cores, xs, strict=True)]
        assert together(calls) == [DEADLINE] * 5
        failures = [core.failure() for core in cores]
        assert [failure["ranks"] for failure in failures] == [[1, 3]] * 5
        assert failures[0]["missing"] == [2]
        assert failures[0]["waited_s"] >= 0.5


def test_a_wait_ends_by_close_on_another_thread_and_says_so() -> None:
    with opened(2) as (core, other):
        x = np.ones(9, np.float32)
        found = []
        thread = threading.Thread(target=lambda: found.append(all_reduce(core, x)))
        thread.start()
        until(lambda: core.absent() == [1])
        core.close()
        thread.join(WAIT_S)
        assert found == [CLOSED]
        assert all_reduce(core, x) == CLOSED
        assert all_reduce(other, x) == PEER_LOST
        assert other.failure()["ranks"] == [0]


def test_who_comes_after_a_deadline_hears_of_it_whatever_it_calls() -> None:
    """Rank 0 has waited for rank 1, which comes when it is too late."""

    def posted(core: Any, x: np.ndarray) -> int:
        assert core.post(address(x), x.size, DTYPES.index(str(x.dtype)), 0, 1.0, x.shape) == OK
        status: int = core.finish_posted()
        return status

    ways: list[Callable[[Any, np.ndarray], int]] = [
        lambda core, x: core.barrier(),
        lambda core, x: core.agree_on_empty(4096, 0, (1024,)),
        lambda core, x: all_reduce(core, x, way=ONE_SHOT),
        lambda core, x: all_reduce(core, x, way=DIRECT),
        lambda core, x: all_reduce(core, x, way=PROGRAM, program=0),
        lambda core, x: collective(core, "reduce_scatter_", x, [0, 4, 9]),
        lambda core, x: collective(core, "all_gather_", np.tile(x, 99), [0, 400, 891]),
        posted,
    ]
    schedule = by_name("ring", 2)
    for call in ways:
        with opened(2, timeouts_s=[0.02, WAIT_S], one_shot_bytes=64) as cores:
            xs = numbers(2, 9, "float32")
            kept = [x.copy() for x in xs]
            for rank, core in enumerate(cores):
                add_schedule(core, schedule, rank)
            assert [call(core, x) for core, x in zip(cores, xs, strict=True)] == [DEADLINE] * 2
            assert [core.failure()["ranks"] for core in cores] == [[1], [1]]
            for x, was in zip(xs, kept, strict=True):
                np.testing.assert_array_equal(x, was)


def test_every_reason_to_give_up_is_told_to_those_who_come_later() -> None:
    for status, heard in ((PEER_LOST, PEER_LOST), (DEADLINE, DEADLINE)):
        with opened(3) as cores:
            cores[0].give_up(status, [2])
            cores[0].give_up(CLOSED, [])  # the first word counts
            x = np.ones(9, np.float32)
            assert all_reduce(cores[0], x) == status
            assert all_reduce(cores[1], x) == heard
            assert [core.failure()["ranks"] for core in cores[:2]] == [[2], [2]]


def test_ranks_beyond_the_64th_are_named_too() -> None:
    with opened(67, stage_bytes=4096) as cores:
        cores[0].give_up(PEER_LOST, [1, 64, 66])
        assert all_reduce(cores[2], np.ones(9, np.float32)) == PEER_LOST
        assert cores[2].failure()["ranks"] == [1, 64, 66]


def test_programs_and_schedules_all_end_with_the_sum() -> None:
    """Every schedule, small and large enough for parts of it at a time; the same communicator all along."""
    with opened(4, stage_bytes=3 * 256, segment_bytes=256) as cores:
        for name in sorted(set(ALGORITHMS) - {"in_network"}):
            for rank, core in enumerate(cores):
                program = add_schedule(core, by_name(name, 4), rank)
            for dtype in ("float32", "int64"):
                given = numbers(4, 700, dtype)
                xs = [x.copy() for x in given]
                calls = [
                    partial(all_reduce, c, x, way=PROGRAM, program=program) for c, x in zip(cores, xs, strict=True)
                ]
                assert together(calls) == [OK] * 4
                for x in xs:
                    np.testing.assert_array_equal(x, sum(given).astype(dtype))

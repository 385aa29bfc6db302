"""Ranks that call different things: every rank says who called what, no tensor changes, and work goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import communicator, on_ranks

from ringside.errors import MismatchError

pytestmark = pytest.mark.native


def f32(n: Any) -> Any:
    return np.ones(n, np.float32)


Call = Callable[[Any], Any]

# What most call, what the odd one calls, and words that must tell both sides.
CASES: dict[str, tuple[Call, Call, tuple[str, str]]] = {
    "count": (lambda c: c.all_reduce(f32(5)), lambda c: c.all_reduce(f32(6)), ("shape (5,)", "shape (6,)")),
    "empty": (lambda c: c.all_reduce(f32(5)), lambda c: c.all_reduce(f32(0)), ("shape (5,)", "shape (0,)")),
    "shape": (lambda c: c.all_reduce(f32((2, 3))), lambda c: c.all_reduce(f32((3, 2))), ("(2, 3)", "(3, 2)")),
    "dimensions": (lambda c: c.all_reduce(f32(())), lambda c: c.all_reduce(f32((1,))), ("shape ()", "shape (1,)")),
    "many dimensions": (
        lambda c: c.all_reduce(f32((1,) * 8 + (2, 3))),
        lambda c: c.all_reduce(f32((1,) * 8 + (3, 2))),
        ("1, 2, 3)", "1, 3, 2)"),
    ),
    "path": (lambda c: c.all_reduce(f32(9000)), lambda c: c.all_reduce(f32(3)), ("(9000,)", "(3,)")),
    "dtype": (
        lambda c: c.all_reduce(f32(5)),
        lambda c: c.all_reduce(np.ones(5, np.int32)),
        ("float32", "int32"),
    ),
    "operation": (lambda c: c.all_reduce(f32(5)), lambda c: c.all_reduce(f32(5), "max"), ("(sum,", "(max,")),
    "average": (lambda c: c.all_reduce(f32(9999)), lambda c: c.all_reduce(f32(9999), "avg"), ("(sum,", "(avg,")),
    "order": (lambda c: c.all_reduce(f32(5)), lambda c: c.barrier(), ("all_reduce(", "barrier()")),
    "memory": (lambda c: c.empty(5), lambda c: c.all_reduce(f32(5)), ("empty(", "all_reduce(")),
    "memory shape": (lambda c: c.empty((5, 2)), lambda c: c.empty((2, 5)), ("(5, 2)", "(2, 5)")),
    "memory dtype": (lambda c: c.empty(5), lambda c: c.empty(5, np.int32), ("float32", "int32")),
    "algorithm": (
        lambda c: c.all_reduce(f32(9000), algorithm="direct"),
        lambda c: c.all_reduce(f32(9000), algorithm="ring"),
        ("algorithm=direct", "algorithm=a schedule"),
    ),
    "one shot": (
        lambda c: c.all_reduce(f32(90_000), algorithm="one_shot"),
        lambda c: c.all_reduce(f32(90_000)),
        ("algorithm=one_shot", "algorithm=direct"),
    ),
    "scale": (
        lambda c: c.all_reduce(f32(5), scale=0.5),
        lambda c: c.all_reduce(f32(5), scale=0.25),
        ("scale=0.5", "scale=0.25"),
    ),
    "asynchronous": (
        lambda c: c.all_reduce(f32(5), async_op=True).wait(),
        lambda c: c.all_reduce(f32(6), async_op=True).wait(),
        ("shape (5,)", "shape (6,)"),
    ),
}


def every_case(odd: int) -> list[tuple[str, tuple[int, ...], str]]:
    told: list[tuple[str, tuple[int, ...], str]] = []
    with communicator(segment_bytes=4096) as comm:
        for name, (most, other, _) in CASES.items():
            try:
                (other if comm.rank == odd else most)(comm)
                told.append((name, (), "nothing"))
            except MismatchError as error:
                told.append((name, error.ranks, str(error)))
            x = f32(5000)
            comm.all_reduce(x)
            assert (x == comm.size).all(), f"after {name}"
            comm.empty(10)
    return told


@pytest.mark.parametrize(("size", "odd"), [(2, 1), (2, 0), (3, 0), (3, 2), (4, 1)])
def test_every_rank_names_both_sides_and_goes_on(size: int, odd: int) -> None:
    for told in on_ranks(size, every_case, odd):
        assert [name for name, _, _ in told] == list(CASES)
        for name, ranks, message in told:
            # Of two ranks nobody can say which is wrong; of more, the odd one out is.
            assert ranks == ((0, 1) if size == 2 else (odd,)), name
            for words in CASES[name][2]:
                assert words in message, (name, message)
            assert f"rank {odd} called" in message


def no_majority() -> tuple[tuple[int, ...], str]:
    with communicator() as comm:
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce(f32(1 + comm.rank // 2))
        comm.barrier()
        return caught.value.ranks, str(caught.value)


def test_without_a_majority_everybody_is_named() -> None:
    for ranks, message in on_ranks(4, no_majority):
        assert ranks == (0, 1, 2, 3)
        assert "ranks 0 and 1 called" in message
        assert "ranks 2 and 3 called" in message


def nothing_changes() -> None:
    with communicator() as comm:
        x = comm.empty(50_000)
        y = f32(50_000)
        for tensor in (x, y, x[:3], y[:3]):
            before = tensor.copy()
            with pytest.raises(MismatchError):
                comm.all_reduce(tensor, "sum" if comm.rank else "prod")
            assert (tensor == before).all()
        comm.all_reduce(y)
        assert (y == comm.size).all()


def test_a_mismatch_changes_no_tensor() -> None:
    on_ranks(3, nothing_changes)


def shifted() -> int:
    """One rank leaves out a collective: the next ones do not match either, until it has been made up for."""
    failures = 0
    with communicator() as comm:
        works = [comm.all_reduce(f32(k + 1), async_op=True) for k in range(10) if not (comm.rank == 1 and k == 4)]
        for work in works[:9]:
            try:
                work.wait()
            except MismatchError as error:
                failures += error.ranks == (1,)
        if comm.rank == 1:
            comm.all_reduce(f32(10))
        else:
            works[9].wait()
    return failures


def test_a_left_out_collective_is_seen_at_once() -> None:
    assert on_ranks(3, shifted) == [5, 5, 5]


def after_close() -> str:
    from ringside.errors import ClosedError

    comm = communicator()
    with pytest.raises(MismatchError):
        comm.all_reduce(f32(1 + comm.rank))
    comm.barrier()
    comm.close()
    with pytest.raises(ClosedError) as caught:
        comm.all_reduce(f32(1))
    return str(caught.value)


def test_an_old_mismatch_is_not_what_a_closed_communicator_tells() -> None:
    for message in on_ranks(2, after_close):
        assert re.fullmatch(
            r"all_reduce \(collective 0\) on rank \d: the communicator is closed on this rank", message
        ), message

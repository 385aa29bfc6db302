from __future__ import annotations

import math

import numpy as np
import pytest

from ringside.monitor.run.records import StepRecord
from ringside.view.server.history import MEANS, History, decode, encode


def record(step: int, rank: int, own: float, **more: float) -> StepRecord:
    return StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=own + 0.01, own_seconds=own, **more)


def test_times_come_back_within_a_thousandth() -> None:
    seconds = np.geomspace(1e-8, 1e6, 5000)
    assert decode(encode(list(seconds)))[1:] == pytest.approx(seconds[1:], rel=1e-3)
    assert decode(encode([0.0])).tolist() == [0.0]
    assert np.isnan(decode(encode([math.nan, -1.0, math.inf]))).all()


def test_rows_are_given_once_and_again_when_they_change() -> None:
    history = History(4)
    history.add([record(step, rank, 0.1) for step in range(5) for rank in range(4)])
    first = history.since(0)
    assert first.steps.tolist() == [0, 1, 2, 3, 4]
    assert not first.more
    assert history.since(first.serial).steps.tolist() == []
    history.add([record(2, 1, 0.2), record(5, 0, 0.1)])
    assert history.since(first.serial).steps.tolist() == [2, 5]


def test_lateness_is_over_the_steps_median_and_the_lines_are_right() -> None:
    history = History(5)
    history.add([record(0, rank, 0.125 if rank == 3 else 0.1, wait_seconds=0.02) for rank in range(5)])
    rows = history.since(0)
    assert ((rows.late[0].astype(float) - 1) / 254) ** 2 == pytest.approx([0, 0, 0, 0.25, 0], abs=0.01)
    assert rows.worst.tolist() == [3]
    assert rows.lines["own"] == pytest.approx([0.1], rel=1e-3)
    assert rows.lines["own_most"] == pytest.approx([0.125], rel=1e-3)
    assert rows.lines["wait"] == pytest.approx([0.02], rel=1e-3)
    assert rows.lines["step"] == pytest.approx([np.mean([0.11] * 4 + [0.135])])
    assert {name.removesuffix("_seconds") for name in MEANS} < set(rows.lines)


def test_missing_ranks_are_unknown_and_impossible_ones_left_out() -> None:
    history = History(3)
    history.add(
        [record(0, 0, 0.1), record(0, 2, math.nan), record(0, 7, 0.1), record(-1, 0, 0.1), record(1 << 60, 0, 1)]
    )
    rows = history.since(0)
    assert rows.steps.tolist() == [0]
    assert rows.late.tolist() == [[1, 0, 0]]
    assert rows.worst.tolist() == [0]
    history.add([record(1, 2, 0.2), record(2, 0, math.nan)])
    assert history.since(rows.serial).worst.tolist() == [2, -1]


@pytest.mark.parametrize("rows", [100, 101])
@pytest.mark.parametrize("at_once", [1, 7, 250])
def test_a_long_run_is_thinned_out_and_keeps_its_span(rows: int, at_once: int) -> None:
    history = History(4, cells=4 * rows)
    for begin in range(0, 1000, at_once):
        steps = range(begin, min(begin + at_once, 1000))
        history.add([record(step, rank, 0.1 + step / 1e4) for step in steps for rank in range(4)])
        assert not np.any(history.rank(0)[0] % history.stride)
    given = history.since(0)
    assert history.stride == 16
    assert given.steps.tolist() == list(range(0, 1000, 16))
    assert given.lines["own"] == pytest.approx(0.1 + given.steps / 1e4, rel=1e-3)
    steps, lines = history.rank(2)
    assert lines["own"] == pytest.approx(0.1 + steps / 1e4, rel=1e-3)


def test_much_comes_in_pieces() -> None:
    history = History(8)
    history.add([record(step, rank, 0.1) for step in range(50) for rank in range(8)])
    serial, steps = 0, []
    while (rows := history.since(serial, cells=80)).more:
        assert rows.late.size <= 80
        steps += rows.steps.tolist()
        serial = rows.serial
    assert steps + rows.steps.tolist() == list(range(50))

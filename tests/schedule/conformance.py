"""What every all-reduce schedule must be; run it on each new one."""

from __future__ import annotations

import pickle

import numpy as np

from ringside.schedule import Schedule, contributions, run, verify


def check_schedule(schedule: Schedule, elements: int = 37) -> None:
    """Fail unless `schedule` is a well-behaved value, proved right, and sums up numbers as its proof says."""
    _check_value(schedule)
    audit = verify(schedule)
    assert audit.ok, "\n".join(problem.message for problem in audit.problems)
    assert all((held == 1).all() for held in list(contributions(schedule))[-1:])
    _check_numbers(schedule, elements)
    _check_expression(schedule)


def _check_value(schedule: Schedule) -> None:
    assert {type(schedule.ranks), type(schedule.chunks), type(schedule.rounds)} == {int}
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    for k in range(schedule.rounds):
        step = schedule.round(k)
        assert step == schedule.round(k), "a round is a pure function of its number"
        assert [a.dtype.name for a in (step.src, step.dst, step.chunk, step.reduce)] == ["int32"] * 3 + ["bool"]
        assert not step.src.flags.writeable


def _check_numbers(schedule: Schedule, elements: int) -> None:
    inputs = np.random.default_rng(0).integers(-1000, 1000, (schedule.ranks, elements))
    np.testing.assert_array_equal(run(schedule, inputs), np.tile(inputs.sum(axis=0), (schedule.ranks, 1)))


def _check_expression(schedule: Schedule) -> None:
    """Evaluate the printed expression in floating point: it must be what every rank computes, bit for bit."""
    inputs = np.random.default_rng(1).standard_normal((schedule.ranks, schedule.chunks)).astype(np.float32)
    results = run(schedule, inputs)
    audit = verify(schedule)
    for chunk in range(min(schedule.chunks, 8)):
        names = {f"x{rank}": inputs[rank, chunk] for rank in range(schedule.ranks)}
        expected = eval(audit.expression(chunk), {"__builtins__": {}}, names)
        assert (results[:, chunk] == expected).all()

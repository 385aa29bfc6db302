"""What every schedule must be, whatever its collective; run it on each new one."""

from __future__ import annotations

import pickle

import numpy as np

from ringside.schedule import Schedule, chunk_bounds, contributions, run, traffic, verify


def check_schedule(schedule: Schedule, elements: int = 37) -> None:
    """Fail unless `schedule` is a well-behaved value, proved right, and does with numbers what its proof says."""
    _check_value(schedule)
    _check_traffic(schedule)
    audit = verify(schedule)
    assert audit.ok, "\n".join(problem.message for problem in audit.problems)
    if not schedule.collective.exactly_once:
        _check_everybody_arrived(schedule)
        return
    _check_contributions(schedule)
    _check_numbers(schedule, elements)
    _check_expression(schedule)


def _check_value(schedule: Schedule) -> None:
    assert {type(schedule.ranks), type(schedule.chunks), type(schedule.rounds), type(schedule.switches)} == {int}
    again = pickle.loads(pickle.dumps(schedule))
    assert again == schedule
    assert hash(again) == hash(schedule)
    for k in range(schedule.rounds):
        step = schedule.round(k)
        assert step == schedule.round(k), "a round is a pure function of its number"
        assert len(step), "a round in which nothing happens is not needed"
        assert [a.dtype.name for a in (step.src, step.dst, step.chunk, step.reduce)] == ["int32"] * 3 + ["bool"]
        assert not step.src.flags.writeable


def _check_traffic(schedule: Schedule) -> None:
    """Count again, transfer by transfer."""
    counted = traffic(schedule)
    matrix = np.zeros((schedule.vertices,) * 2, dtype=np.int64)
    reduced = np.zeros(schedule.vertices, dtype=np.int64)
    for k in range(schedule.rounds):
        filled = set()
        for src, dst, chunk, reducing in schedule.round(k):
            matrix[src, dst] += 1
            # The first message of a fold at a switch meets nothing that it could be added to.
            reduced[dst] += reducing and (dst < schedule.ranks or (dst, chunk) in filled)
            filled.add((dst, chunk))
    np.testing.assert_array_equal(counted.matrix(), matrix)
    np.testing.assert_array_equal(counted.sent, matrix.sum(axis=1))
    np.testing.assert_array_equal(counted.received, matrix.sum(axis=0))
    np.testing.assert_array_equal(counted.reduced, reduced)
    assert [(s, d, x * schedule.chunks) for s, d, x in counted.links()] == [
        (int(s), int(d), matrix[s, d]) for s, d in np.argwhere(matrix)
    ]
    assert counted.busiest_link_bytes * schedule.chunks == matrix.max()
    assert counted.busiest_link is None or matrix[counted.busiest_link] == matrix.max()


def _tables(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    collective = schedule.collective
    return collective.holds(schedule.ranks, schedule.chunks), collective.wants(schedule.ranks, schedule.chunks)


def _check_contributions(schedule: Schedule) -> None:
    holds, wants = _tables(schedule)
    final = list(contributions(schedule))[-1][: schedule.ranks]
    for rank, chunk in np.argwhere(wants):
        np.testing.assert_array_equal(final[rank, chunk], holds[:, chunk])


def _check_everybody_arrived(schedule: Schedule) -> None:
    holds, wants = _tables(schedule)
    final = list(contributions(schedule))[-1][: schedule.ranks]
    assert ((final > 0) == holds.T).all(axis=2)[wants].all()


def _per_element(table: np.ndarray, elements: int) -> np.ndarray:
    """Spread a [ranks, chunks] table over the chunks' elements."""
    return np.repeat(table, np.diff(chunk_bounds(elements, table.shape[1])), axis=1)


def _check_numbers(schedule: Schedule, elements: int) -> None:
    """What ranks have where they hold nothing is any number here, and must not show in a result."""
    holds, wants = (_per_element(table, elements) for table in _tables(schedule))
    inputs = np.random.default_rng(0).integers(-1000, 1000, (schedule.ranks, elements))
    expected = np.tile(np.where(holds, inputs, 0).sum(axis=0), (schedule.ranks, 1))
    np.testing.assert_array_equal(run(schedule, inputs)[wants], expected[wants])


def _check_expression(schedule: Schedule) -> None:
    """Evaluate the printed expression in floating point: it must be what every rank computes, bit for bit."""
    _, wants = _tables(schedule)
    inputs = np.random.default_rng(1).standard_normal((schedule.ranks, schedule.chunks)).astype(np.float32)
    results = run(schedule, inputs)
    audit = verify(schedule)
    for chunk in range(min(schedule.chunks, 8)):
        names = {f"x{rank}": inputs[rank, chunk] for rank in range(schedule.ranks)}
        expected = eval(audit.expression(chunk, int(wants[:, chunk].argmax())), {"__builtins__": {}}, names)
        assert (results[wants[:, chunk], chunk] == expected).all()
    assert audit.canonical == _adds_from_the_left(schedule)


def _adds_from_the_left(schedule: Schedule) -> bool:
    """Add random numbers: with 64 of them per chunk, another bracketing shows in at least one."""
    elements = 64 * schedule.chunks
    holds, wants = (_per_element(table, elements) for table in _tables(schedule))
    inputs = np.random.default_rng(2).standard_normal((schedule.ranks, elements)).astype(np.float32)
    left = np.zeros(elements, dtype=np.float32)
    for rank in range(schedule.ranks):
        left = np.where(holds[rank], left + inputs[rank], left)
    expected = np.tile(left, (schedule.ranks, 1))
    return bool((run(schedule, inputs)[wants] == expected[wants]).all())

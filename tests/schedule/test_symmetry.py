from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.schedule import (
    ALGORITHMS,
    COLLECTIVES,
    Collective,
    Round,
    Schedule,
    by_name,
    direct,
    from_rounds,
    pipelined,
    reverse,
    ring,
    traffic,
    tree,
    verify,
)

ROTATIONAL = sorted(name for name in {**ALGORITHMS, **COLLECTIVES} if by_name(name, 4).rotational)


def rotated_by_hand(schedule: Schedule) -> Schedule:
    """The same schedule written out, without its symmetry."""
    n, shift = schedule.ranks, schedule.chunks // schedule.ranks
    rounds = []
    for k in range(schedule.rounds):
        rows = [
            ((src + i) % n, (dst + i) % n, (chunk + i * shift) % schedule.chunks, reducing)
            for i in range(n)
            for src, dst, chunk, reducing in schedule.representatives(k)
        ]
        rounds.append(Round.of(rows))
    return from_rounds(schedule.name, n, schedule.chunks, rounds, collective=schedule.collective)


def generated(rows: tuple[tuple[tuple[int, int, int, bool], ...], ...], k: int) -> Round:
    return Round.of(rows[k])


def rotational(n: int, chunks: int, rows, collective: str = "all_reduce") -> Schedule:
    rounds = tuple(tuple(map(tuple, step)) for step in rows)
    return Schedule(
        "handmade", n, chunks, len(rounds), generated, (rounds,), 0, Collective(collective), rotational=True
    )


def test_these_are_rotational():
    assert ROTATIONAL == [
        "direct", "direct_all_gather", "direct_reduce_scatter", "ring", "ring_all_gather", "ring_reduce_scatter",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ROTATIONAL)
@pytest.mark.parametrize("ranks", [*range(1, 10), 31])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("backwards", [False, True])
def test_one_orbit_and_the_whole_say_the_same(name: str, ranks: int, segments: int, backwards: bool):
    s = pipelined(by_name(name, ranks), segments)
    s = reverse(s) if backwards else s
    orbit, whole = verify(s, by_symmetry=True), verify(s, by_symmetry=False)
    assert orbit.by_symmetry
    assert orbit.ok
    assert replace(orbit, by_symmetry=False) == whole
    for chunk in {0, s.chunks // 2, s.chunks - 1}:
        wanting = int(s.collective.wants(ranks, s.chunks)[:, chunk].argmax())
        for rank in {wanting, (wanting + 1) % ranks, 0}:  # of a reduce-scatter the others end with what is underway
            assert sorted(orbit.expression(chunk, rank).replace("(", "").replace(")", "").split("+")) == sorted(
                whole.expression(chunk, rank).replace("(", "").replace(")", "").split("+")
            )
    one, all_of_it = traffic(s), traffic(rotated_by_hand(s))
    np.testing.assert_array_equal(one.matrix(), all_of_it.matrix())
    np.testing.assert_array_equal(one.reduced, all_of_it.reduced)
    assert (one.ports, list(one.links())) == (all_of_it.ports, list(all_of_it.links()))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_changed_orbit_is_judged_as_the_whole_schedule_is(data: st.DataObject):
    """Change one representative of a ring or of direct at will: the orbit must find what the whole proof finds."""
    n = data.draw(st.integers(2, 5))
    s = data.draw(st.sampled_from([ring(n), direct(n), pipelined(ring(n), 2)]))
    rows = [list(s.representatives(k)) for k in range(s.rounds)]
    k = data.draw(st.integers(0, s.rounds - 1))
    i = data.draw(st.integers(0, len(rows[k]) - 1))
    change = data.draw(
        st.tuples(st.just(0), st.integers(1, n - 1), st.integers(0, s.chunks - 1), st.booleans()) | st.none()
    )
    rows[k][i : i + 1] = [] if change is None else [change]
    mutant = rotational(n, s.chunks, rows)
    orbit, whole = verify(mutant, by_symmetry=True), verify(mutant, by_symmetry=False)
    assert orbit.ok == whole.ok
    assert {p.kind for p in orbit.problems} <= {p.kind for p in whole.problems}


def test_a_wrong_orbit_is_named():
    rows = [list(ring(4).representatives(k)) for k in range(6)]
    broken = rotational(4, 4, [rows[0], [], *rows[2:]])
    problems = verify(broken, by_symmetry=True).problems
    assert {p.kind for p in problems} == {"missing"}
    assert "chunk 0 of rank" in problems[0].message
    impossible = verify(rotational(4, 4, [[(0, 1, 9, True)]]), by_symmetry=True).problems
    assert impossible[0].kind == "malformed"
    assert "there is no chunk 9" in impossible[0].message


def test_an_overwrite_beside_another_write_is_named_once_with_its_round():
    rows = [list(ring(4).representatives(k)) for k in range(6)]
    for k in (3, 5):
        ((_, dst, chunk, _),) = rows[k]
        rows[k].append(((dst + 2) % 4, dst, chunk, True))
    problems = verify(rotational(4, 4, rows), by_symmetry=True).problems
    assert [(p.kind, p.round) for p in problems if p.kind == "order"] == [("order", 3), ("order", 5)]


def test_folds_that_do_not_rotate_are_proved_the_long_way():
    """Rank 0 adds what three others have already summed: in another turn the fold has another order."""
    gather = [[(0, 1, 0, True)], [(0, 1, 1, True), (0, 2, 2, True)]]
    audit = verify(rotational(4, 4, gather), by_symmetry=True)
    assert not audit.by_symmetry


def test_a_ring_of_24576_is_proved_from_its_orbit():
    schedule = ring(24_576)
    assert (schedule.ranks, schedule.chunks, schedule.rounds) == (24_576, 24_576, 49_150)
    assert len(schedule.round(49_149)) == 24_576
    audit = verify(schedule)
    assert audit.ok
    assert audit.by_symmetry
    assert audit.max_bytes_sent == audit.lower_bound_bytes == Fraction(2 * 24_575, 24_576)
    assert (audit.max_ports, audit.busiest_link, audit.canonical) == (1, (0, 1), False)


def test_the_order_of_a_huge_ring():
    """Chunk 5 starts at rank 6 and collects everybody on its way around."""
    audit = verify(ring(300))
    assert audit.by_symmetry
    text = audit.expression(5, 17)
    assert "(x6+x7)" in text
    leaves = text.replace("(", "").replace(")", "").split("+")
    assert sorted(leaves) == sorted(f"x{r}" for r in range(300))


def test_only_rotational_schedules_have_representatives():
    with pytest.raises(UsageError, match="tree has no rotational symmetry"):
        tree(4).representatives(0)
    with pytest.raises(UsageError, match="cannot be rotational: 6 chunks and 0 switches"):
        rotational(4, 6, [])

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, Schedule, by_name, direct, ring, run, verify

from .conformance import check_schedule

names = st.sampled_from(sorted(ALGORITHMS))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 13, 16])
def test_conforms(name: str, ranks: int):
    check_schedule(by_name(name, ranks))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
@pytest.mark.parametrize("ranks", [*range(1, 65), 127, 128])
def test_is_proved_right(name: str, ranks: int):
    audit = verify(by_name(name, ranks))
    assert audit.ok, audit.problems[:3]


@settings(deadline=None, max_examples=60)
@given(names, st.integers(1, 64), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_sums_any_number_of_elements(name: str, ranks: int, elements: int, seed: int):
    inputs = np.random.default_rng(seed).integers(-(2**31), 2**31, (ranks, elements))
    result = run(by_name(name, ranks), inputs)
    np.testing.assert_array_equal(result, np.tile(inputs.sum(axis=0), (ranks, 1)))


@settings(deadline=None, max_examples=20)
@given(names, st.integers(1, 16), st.sampled_from([np.maximum, np.minimum, np.multiply, np.bitwise_xor]))
def test_other_operations(name: str, ranks: int, op: np.ufunc):
    inputs = np.random.default_rng(ranks).integers(-9, 9, (ranks, 23))
    result = run(by_name(name, ranks), inputs, op)
    np.testing.assert_array_equal(result, np.tile(op.reduce(inputs, axis=0), (ranks, 1)))


@pytest.mark.parametrize("ranks", range(2, 20))
def test_ring_costs_what_the_paper_says(ranks: int):
    audit = verify(ring(ranks))
    assert audit.rounds == 2 * (ranks - 1)
    assert (
        audit.max_bytes_sent == audit.max_bytes_received == audit.lower_bound_bytes == Fraction(2 * (ranks - 1), ranks)
    )
    assert audit.max_ports == 1


@pytest.mark.parametrize("ranks", range(2, 20))
def test_direct_costs_two_rounds_and_all_ports(ranks: int):
    audit = verify(direct(ranks))
    assert (audit.rounds, audit.max_ports) == (2, ranks - 1)
    assert audit.max_bytes_sent == audit.max_bytes_received == audit.lower_bound_bytes


def test_direct_adds_in_rank_order_in_every_chunk():
    audit = verify(direct(4))
    assert {audit.expression(chunk, rank) for chunk in range(4) for rank in range(4)} == {"(((x0+x1)+x2)+x3)"}


def test_ring_adds_once_around_the_ring():
    assert verify(ring(4)).expression(2) == "(((x0+x3)+x1)+x2)"


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_ring_only_sends_to_the_right_and_ends_the_first_half_with_ones_own_chunk(ranks: int):
    schedule = ring(ranks)
    for k in range(schedule.rounds):
        step = schedule.round(k)
        assert (step.dst == (step.src + 1) % ranks).all()
    last_reduction = schedule.round(ranks - 2)
    assert (last_reduction.chunk == last_reduction.dst).all()
    assert last_reduction.reduce.all()


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_one_rank_does_nothing(name: str):
    schedule = by_name(name, 1)
    assert (schedule.rounds, schedule.chunks) == (0, 1)
    assert verify(schedule).max_bytes_sent == 0


def test_a_huge_ring_is_made_without_making_its_rounds():
    schedule = ring(24_576)
    assert (schedule.ranks, schedule.chunks, schedule.rounds) == (24_576, 24_576, 49_150)
    assert len(schedule.round(49_149)) == 24_576


def test_an_unknown_name_lists_what_exists():
    with pytest.raises(UsageError, match=r"no algorithm 'butterfly'; there are direct, ring"):
        by_name("butterfly", 4)


@pytest.mark.parametrize("ranks", [0, -3])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_no_ranks_are_refused(name: str, ranks: int):
    with pytest.raises(UsageError, match=f"{name} needs at least 1 rank, not {ranks}"):
        by_name(name, ranks)
    with pytest.raises(UsageError, match="at least 1"):
        ALGORITHMS[name](ranks)


@pytest.mark.parametrize("k", [-1, 6])
def test_rounds_that_do_not_exist_are_refused(k: int):
    with pytest.raises(UsageError, match=f"rounds 0 to 5, not {k}"):
        ring(4).round(k)


def test_schedules_are_values():
    assert ring(4) == ring(4)
    assert ring(4) != ring(5)
    assert len({ring(4), ring(4), direct(4)}) == 2
    with pytest.raises(AttributeError):
        ring(4).ranks = 5  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        ring(4).round(0).src[0] = 3


def test_the_public_names():
    import ringside.schedule

    assert isinstance(ringside.schedule.ring(2), Schedule)
    assert set(ringside.schedule.__all__) == {
        "ALGORITHMS", "Audit", "Problem", "Round", "Schedule", "by_name", "chunk_bounds", "contributions", "direct",
        "from_rounds", "ring", "run", "verify",
    }  # fmt: skip

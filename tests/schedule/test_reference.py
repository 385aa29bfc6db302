from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.schedule import Round, chunk_bounds, contributions, from_rounds, ring, run

X = np.array([[1.0], [2.0], [4.0], [8.0]])


@given(st.integers(0, 10_000), st.integers(1, 300))
def test_chunks_cover_everything_and_differ_by_at_most_one(elements: int, chunks: int):
    sizes = np.diff(bounds := chunk_bounds(elements, chunks))
    assert (bounds[0], bounds[-1], len(sizes)) == (0, elements, chunks)
    assert sizes.max() - sizes.min() <= 1
    assert [int(b) for b in bounds] == [i * elements // chunks for i in range(chunks + 1)]


def test_transfers_carry_the_value_from_the_start_of_the_round():
    swap = from_rounds("swap", 4, 1, [Round.of([(0, 1, 0, False), (1, 0, 0, False), (1, 2, 0, True)])])
    assert run(swap, X)[:, 0].tolist() == [2, 1, 6, 8]


def test_reductions_are_one_left_fold_in_rank_order():
    # 1e8 + 1 is 1e8 in float32, so the three possible trees give three different sums.
    inputs = np.array([[1.0], [1e8], [-1e8]], dtype=np.float32)
    gather = from_rounds("gather", 3, 1, [Round.of([(2, 1, 0, True), (0, 1, 0, True)])])
    assert run(gather, inputs)[1, 0] == (inputs[0, 0] + inputs[1, 0]) + inputs[2, 0] == 0
    assert inputs[0, 0] + (inputs[1, 0] + inputs[2, 0]) == 1


def test_inputs_are_left_alone_and_the_type_is_kept():
    inputs = np.ones((4, 3), dtype=np.float16)
    assert run(ring(4), inputs).dtype == np.float16
    assert (inputs == 1).all()


@pytest.mark.parametrize("shape", [(3, 5), (4,), (4, 2, 2)])
def test_other_shapes_are_refused(shape: tuple[int, ...]):
    with pytest.raises(UsageError, match=r"inputs must be \[4, elements\]"):
        run(ring(4), np.zeros(shape))


def test_rounds_need_arrays_of_one_length():
    with pytest.raises(UsageError, match="four arrays of one length"):
        Round(np.zeros(2), np.zeros(2), np.zeros(3), np.zeros(2))


def test_contributions_follow_the_ring():
    held = list(contributions(ring(3)))
    assert len(held) == 5
    assert held[0][1, 2].tolist() == [0, 1, 0]
    # Chunk 0 starts at rank 1 and is added up on its way to rank 0.
    assert held[1][2, 0].tolist() == [0, 1, 1]
    assert held[2][0, 0].tolist() == [1, 1, 1]
    assert (held[4] == 1).all()


def test_contributions_count_repetitions():
    twice = from_rounds("twice", 2, 1, [Round.of([(0, 1, 0, True), (0, 1, 0, True)])])
    assert list(contributions(twice))[1][1, 0].tolist() == [2, 1]

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringside.monitor.stats import log_excess, median, row_medians, usable


def slowly(row: np.ndarray) -> np.ndarray:
    """The definition, one rank at a time."""
    result = np.full(len(row), np.nan)
    for rank, value in enumerate(row):
        others = [np.log(x) for other, x in enumerate(row) if other != rank and np.isfinite(x) and x > 0]
        if np.isfinite(value) and value > 0 and others:
            result[rank] = np.log(value) - np.median(others)
    return result


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        np.float64,
        st.integers(1, 9),
        elements=st.one_of(st.floats(1e-6, 1e3), st.sampled_from([1.0, 0.0, -1.0, np.nan, np.inf])),
    )
)
def test_agrees_with_the_definition_for_any_input(row: np.ndarray) -> None:
    np.testing.assert_allclose(log_excess(row), slowly(row), atol=1e-12)


def test_of_two_ranks_one_excess_is_minus_the_other() -> None:
    excess = log_excess([[1.0, 1.3], [2.0, 1.0]])
    np.testing.assert_allclose(excess[:, 0], -excess[:, 1])
    np.testing.assert_allclose(excess[0, 1], np.log(1.3))


def test_usable_keeps_only_positive_finite_numbers() -> None:
    np.testing.assert_array_equal(usable([1.0, 0.0, -1.0, np.inf, np.nan]), [1.0, *[np.nan] * 4])


def test_row_medians_of_nothing_are_nan() -> None:
    np.testing.assert_array_equal(row_medians(np.array([[1.0, np.nan, 3.0], [np.nan] * 3])), [2.0, np.nan])


@settings(max_examples=200, deadline=None)
@given(
    hnp.arrays(
        np.float64,
        st.tuples(st.integers(1, 9), st.integers(1, 3), st.integers(1, 3)),
        elements=st.one_of(st.floats(-1.0, 1.0), st.just(np.nan)),
    )
)
def test_a_median_is_that_of_what_is_known_where_half_is(window: np.ndarray) -> None:
    before, columns = window.copy(), window.reshape(len(window), -1).T
    known = [column[~np.isnan(column)] for column in columns]
    expected = [np.median(some) if 2 * len(some) >= len(window) else np.nan for some in known]
    np.testing.assert_array_equal(median(window).ravel(), expected)
    np.testing.assert_array_equal(window, before)

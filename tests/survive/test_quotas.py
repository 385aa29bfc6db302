import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.survive.protocol.settings import balanced_quotas, equal_quotas, step_seconds

times = st.lists(st.floats(0.1, 10), min_size=1, max_size=3)


@given(times, st.integers(0, 9))
def test_no_other_quotas_end_earlier(seconds, micro_batches):
    quotas = balanced_quotas(seconds, micro_batches)
    assert sum(quotas) == micro_batches
    others = itertools.product(range(micro_batches + 1), repeat=len(seconds))
    best = min(step_seconds(seconds, q) for q in others if sum(q) == micro_batches)
    assert step_seconds(seconds, quotas) <= best * (1 + 1e-9)


def test_one_of_two_ranks_twice_as_slow():
    even, fair = equal_quotas(range(2), 8), balanced_quotas([1.0, 2.0], 8)
    assert fair in ((5, 3), (6, 2))
    assert step_seconds([1.0, 2.0], fair) / 4 <= 1.5
    assert step_seconds([1.0, 2.0], fair) / step_seconds([1.0, 2.0], even) == pytest.approx(0.75)
    assert step_seconds([1.0, 2.0], balanced_quotas([1.0, 2.0], 12)) / 6 == pytest.approx(8 / 6)


@pytest.mark.parametrize("seconds", [[], [1.0, 0.0], [1.0, float("nan")], [float("inf")]])
def test_times_that_are_none_are_refused(seconds):
    with pytest.raises(UsageError, match="above 0 seconds"):
        balanced_quotas(seconds, 4)

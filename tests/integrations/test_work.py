"""How much work a batch is."""

from __future__ import annotations

import collections

import pytest

torch = pytest.importorskip("torch")

from ringside.integrations.models import work_of  # noqa: E402


@pytest.mark.parametrize(
    ("given", "work"),
    [
        ((torch.zeros(5, 3),), 5),
        (([torch.zeros(5, 3), torch.zeros(7)], 0), 5),
        ((torch.tensor(1.0), torch.zeros(4)), 4),
        (({"labels": torch.zeros(6, 9), "input_ids": torch.zeros(6, 9)},), 54),
        (((), {"pixels": torch.zeros(3, 2, 2)}), 3),
        ((collections.UserDict(input_ids=torch.zeros(2, 8)),), 16),
        (([{"nested": ({"input_ids": [torch.zeros(2, 8)]},)}],), 16),
        (("text", 3, None), 0),
        ((), 0),
    ],
)
def test_work_of(given: tuple[object, ...], work: int) -> None:
    assert work_of(*given) == work

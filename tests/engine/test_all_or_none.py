"""A collective finishes on all ranks or fails on all of them: every interleaving of small jobs."""

from __future__ import annotations

import pytest
from tests.engine.all_or_none import RULES, problem


@pytest.mark.parametrize(("ranks", "collectives"), [(2, 2), (3, 2)])
def test_no_interleaving_ends_differently_on_two_ranks(ranks: int, collectives: int) -> None:
    assert problem(ranks, collectives) == ""


@pytest.mark.parametrize("rule", RULES)
def test_each_part_of_the_protocol_is_needed(rule: str) -> None:
    assert "failed on one rank and succeeded on another" in problem(3, 1, without=rule)

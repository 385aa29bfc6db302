"""What is awaited before connections are made."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from ringside.engine.transports.arrival import await_arrivals
from ringside.engine.transports.base import LinkError, LinkFailure


class Ranks:
    """A store and a clock: ranks come at their times, seconds."""

    def __init__(self, come: dict[int, float]) -> None:
        self.come, self.now = come, 0.0
        self.awaited: list[int] = []

    def set(self, key: str, _: str) -> None:
        """Note that a rank has come."""
        self.come[int(key.removeprefix("come/"))] = self.now

    def check(self, keys: list[str]) -> bool:
        """Return whether a rank has come."""
        return self.come.get(int(keys[0].removeprefix("come/")), 1e9) <= self.now

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def wait(self, rank: int, timeout_s: float, attend: Any = None) -> None:
        """Wait for ranks 0 to 3."""
        attend = attend or self.awaited.append
        store: Any = self
        await_arrivals(store, rank, range(4), timeout_s, attend, clock=lambda: self.now, sleep=self.sleep)


def test_all_are_awaited_and_looked_after() -> None:
    ranks = Ranks({0: 0.5, 3: 0.0, 2: 1.5})
    ranks.wait(1, 5.0)
    assert 1.5 <= ranks.now <= 1.6
    assert set(ranks.awaited) == {0, 2}
    assert ranks.come[1] == 0.0


def test_a_rank_that_never_comes_is_late() -> None:
    ranks = Ranks({0: 0.0, 3: 0.0})
    with pytest.raises(LinkError) as raised:
        ranks.wait(1, 5.0)
    assert raised.value.cause == LinkFailure("late", 2)
    assert 5.0 <= ranks.now <= 5.2


def test_a_wait_ends_where_it_makes_no_sense() -> None:
    ranks = Ranks({0: 0.0, 3: 0.0})

    def attend(rank: int) -> None:
        if ranks.now > 1.0:
            raise LinkError(LinkFailure("lost", rank))

    with pytest.raises(LinkError) as raised:
        ranks.wait(1, 5.0, attend)
    assert raised.value.cause == LinkFailure("lost", 2)
    assert ranks.now < 1.2

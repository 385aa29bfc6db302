"""All-reduces that were begun and not finished, two of them beside each other, and what carries each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ringside.engine.background import Background, Work
from ringside.engine.exchange import Exchange
from ringside.engine.told import Doing

if TYPE_CHECKING:
    from ringside.engine.across import Across


class UnderWay:
    """An all-reduce that was begun.

    Args:
        across: Who carries it out.
        way: How, in words.
        doing: What peers are told.
        rest: What is left to do; None: nothing.
        side: Which of the exchanges carries it: one that is begun before another is finished takes the other one.
    """

    def __init__(
        self, across: Across, way: str, doing: Doing, rest: Callable[[], None] | None = None, side: int = 0
    ) -> None:
        self.doing, self.side = doing, side
        self._across, self._way, self._rest = across, way, rest

    def finish(self) -> None:
        """Return when the result is there; raise what `Across.all_reduce` raises."""
        while self._rest is not None and self._across._open and self._across._open[0] is not self:
            self._across._open[0].finish()
        if self._rest is None:
            return
        with self._across.explained(self._way, self.doing):
            rest, self._rest = self._rest, None
            try:
                rest()
            finally:
                self._across._open.popleft()


class Sides:
    """Exchanges whose collectives are under way at the same time, each on a thread of its own, made when needed.

    Which side carries what must follow from the order of the calls alone, so that all ranks take the same.

    Args:
        exchange: The first side's.
        name: Of the threads.
    """

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchanges = [exchange]
        self._carriers: list[Background] = []
        self._name = name

    def exchange(self, side: int) -> Exchange:
        """Return a side's exchange."""
        while len(self._exchanges) <= side:
            self._exchanges.append(self._exchanges[0].beside())
        return self._exchanges[side]

    def submit(self, side: int, job: Callable[[], None]) -> Work:
        """Carry a job out on a side's thread, after those before it."""
        while len(self._carriers) <= side:
            self._carriers.append(Background(self._name))
        return self._carriers[side].submit(job)

    def stop(self, timeout_s: float) -> None:
        """End the threads; wait for each as long as told."""
        for carrier in self._carriers:
            carrier.stop(timeout_s)


__all__ = ["Sides", "UnderWay"]

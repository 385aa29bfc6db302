"""The simulated network: messages arrive later, out of order, and where a fault says so, much later or never."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable


class Network:
    """What is between processes.

    Args:
        chance: Gives delays.
        after: Calls something so many seconds later.
    """

    def __init__(self, chance: random.Random, after: Callable[[float, Callable[[], None]], None]) -> None:
        self._chance, self._after = chance, after
        self._lost: Counter[int] = Counter()
        self._late: Counter[int] = Counter()
        self._cut: set[tuple[int, int]] = set()

    def lose_next_of(self, rank: int) -> None:
        """Lose the next message that a rank sends."""
        self._lost[rank] += 1

    def delay_next_of(self, rank: int) -> None:
        """Delay the next message that a rank sends, perhaps until others have given up waiting for it."""
        self._late[rank] += 1

    def cut(self, src: int, dst: int) -> None:
        """From now on the connection carries nothing in this direction; neither end is told."""
        self._cut.add((src, dst))

    def is_cut(self, src: int, dst: int) -> bool:
        """Tell whether a connection carries nothing any more."""
        return (src, dst) in self._cut

    def carry(self, src: int, dst: int, deliver: Callable[[], None], by_store: bool = False) -> None:
        """Carry a message from rank to rank, by their connection or by the store."""
        if _one_of(self._lost, src) or (not by_store and self.is_cut(src, dst)):
            return
        late = self._chance.uniform(0.3, 1.5) if _one_of(self._late, src) else 0.0
        self._after(self._chance.uniform(0.0005, 0.002) + late, deliver)


def _one_of(left: Counter[int], rank: int) -> bool:
    """Tell whether there is one left, and take it."""
    found = left[rank] > 0
    left[rank] -= found
    return found


__all__ = ["Network"]

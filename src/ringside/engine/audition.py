"""Promising choices take turns in the first all-reduces of a size: a state machine. No clock, no messages of its own.

What is timed at start-up has to be done in a second, so large sizes are not timed at all and small ones a few times.
The first all-reduces of the job itself are of just the sizes that matter, and cost only what a worse choice takes more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ringside.engine.choice import NATIVE
from ringside.engine.selection_table import Rank, Row

MOST = 5  # choices that take part, besides the native ones
PROMISING = 1.3  # times the least expected: slower ones do not take part
HOPELESS = (3.0, 1.5, 1.3, 1.15)  # times the best so far, turn by turn: such a choice leaves
TURNS_LARGE, TURNS_SMALL = 5, 10  # the first of them warms up: connections, places, pages
LARGE_BYTES = 1 << 20
_NATIVES = (NATIVE, f"hosts/{NATIVE}")


def invited(rank: Rank) -> list[str]:
    """Return the choices that take part at a size, the present one first; fewer than two: nobody needs to.

    These are the fastest expected, and the native ones wherever they were not timed at this size: what they take may
    jump from one size to the next.
    """
    least = min((row.expected_s for row in rank.rows if row.eligible), default=math.inf)
    near = [row.choice for row in rank.rows if row.expected_s <= PROMISING * least]
    native = [row.choice for row in rank.rows if row.choice in _NATIVES and row.measured_s is None]
    return list(dict.fromkeys([rank.winner, *near[: MOST - 1], *native])) if near else []


class Audition:
    """The turns of one size.

    Every rank calls `took` after each all-reduce; when a turn is over (`complete`), all ranks agree on the slowest
    rank's `times` and give them to `judge`.

    Args:
        names: The choices.
        turns: How many each has.
    """

    def __init__(self, names: Sequence[str], turns: int) -> None:
        self.names = list(names)
        self._turns = turns
        self._going = list(range(len(names)))
        self._took: dict[int, float] = {}
        self._heard: list[list[float]] = [[] for _ in names]
        self._number = 0

    @property
    def current(self) -> str:
        """Whose turn it is; each turn begins with another one."""
        order = self._going[self._number % len(self._going) :] + self._going[: self._number % len(self._going)]
        return self.names[next(at for at in order if at not in self._took)]

    def took(self, seconds: float) -> None:
        """Take what the current choice took here."""
        self._took[self.names.index(self.current)] = seconds

    @property
    def complete(self) -> bool:
        """Whether all have had their turn."""
        return len(self._took) == len(self._going)

    @property
    def times(self) -> list[float]:
        """What each took here in this turn, -1 for those that left, by `names`."""
        return [self._took.get(at, -1.0) for at in range(len(self.names))]

    def judge(self, slowest: Sequence[float]) -> None:
        """Take the slowest rank's times of this turn, by `names`."""
        for at in self._going:
            if self._number == 1:
                self._heard[at].clear()  # what was only warming up
            self._heard[at].append(slowest[at])
        so_far = {at: usual(self._heard[at]) for at in self._going}
        most = HOPELESS[min(self._number, len(HOPELESS) - 1)] * min(so_far.values())
        self._going = [at for at in self._going if so_far[at] <= most]
        self._took = {}
        self._number += 1

    @property
    def over(self) -> bool:
        """Whether it is decided."""
        return self._number >= self._turns or len(self._going) == 1

    def result(self) -> dict[str, float]:
        """Return the usual time of each choice, seconds, those that left among them."""
        return {name: usual(times) for name, times in zip(self.names, self._heard, strict=True)}

    def finalists(self) -> set[str]:
        """Return those that have not left."""
        return {self.names[at] for at in self._going}


def usual(times: Sequence[float]) -> float:
    """Return the lower tertile: what else a machine does makes a fast choice look slow, nothing a slow one fast."""
    return sorted(times)[(len(times) - 1) // 3]


def turns_at(size_bytes: int) -> int:
    """Return how many turns the choices have at a size."""
    return TURNS_LARGE if size_bytes >= LARGE_BYTES else TURNS_SMALL


def settled(rank: Rank, audition: Audition) -> Rank:
    """Return what was decided at a size by an audition that is over."""
    heard, finalists = audition.result(), audition.finalists()
    winner = min(finalists, key=lambda name: (heard[name], name))
    native = heard.get(NATIVE, next((row.expected_s for row in rank.rows if row.choice == NATIVE), math.inf))
    rows = []
    for row in rank.rows:
        if row.choice in heard:
            took = heard[row.choice]
            row = Row(row.choice, row.predicted_s, took, took, row.choice == NATIVE or took <= native)
        rows.append(row)
    rows.sort(key=lambda row: (row.expected_s, row.choice))
    others = sorted((took, name) for name, took in heard.items() if name != winner)
    beside = ", ".join(f"{name} {1e3 * took:.3g} ms" for took, name in others)
    why = f"{winner}: {1e3 * heard[winner]:.3g} ms where it was used in turn with {beside}"
    return Rank(rank.size_bytes, winner, why, tuple(rows), audition._number)


__all__ = ["Audition", "invited", "settled", "turns_at"]

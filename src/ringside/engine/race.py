"""Which choices are timed at a size, turn by turn, and which of them are given up. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ringside.engine.choice import NATIVE, Choice
from ringside.engine.pricing import Price
from ringside.engine.selection_table import LADDER, predicted_at

MOST_TIMED = 4 << 20
"""Larger tensors go in blocks of this size: their ranking is that of one block."""
HOPELESS = 2.0
"""A choice that takes so many times what the best of a turn does is not timed again."""

_FEWEST = "leaders/parameter_server"  # it has the fewest messages; their price does not tell how busy cores will be


class Plan(msgspec.Struct, frozen=True):
    """What rank 0 has all ranks time: choices per size."""

    turns: list[tuple[int, list[str]]]


@dataclass(eq=False)
class Race:
    """The choices that are timed at one size, turn by turn; the same on all ranks."""

    size: int
    names: list[str]
    keep: frozenset[str]

    def __post_init__(self) -> None:
        self.data = np.zeros(max(self.size // 4, 1), dtype=np.float32)
        self.going = list(range(len(self.names)))
        self.turns: list[np.ndarray[Any, np.dtype[np.float64]]] = []

    def took(self, seconds: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Take a turn's times of the slowest rank, -1 where a choice was not timed, and leave out the hopeless."""
        self.turns.append(seconds)
        best = min(float(seconds[at]) for at in self.going)
        self.going = [at for at in self.going if self.names[at] in self.keep or seconds[at] <= HOPELESS * best]

    def cost_s(self) -> float:
        """Return what the next turn takes, if it takes what the last one did."""
        return sum(max(float(self.turns[-1][at]), 0.0) for at in self.going)

    def medians(self) -> dict[tuple[str, int], float]:
        """Return the median of each choice's turns."""
        if not self.turns:
            return {}
        took = np.array(self.turns)
        times = zip(self.names, (column[column >= 0] for column in took.T), strict=True)
        return {(name, self.size): float(np.median(seconds)) for name, seconds in times if len(seconds)}


def best_at(prices: Mapping[str, Sequence[Price]], size: int) -> list[str]:
    """Return the choices to time at a size, the most promising first after native, of every way by turns.

    These are the native ones, and the best by price over leaders, hosts and ranks each.
    """
    ways: list[list[str]] = []
    shared = f"hosts/{NATIVE}" in prices
    for over, small, large, block in (("leaders", 3, 1, 0), ("hosts", 2, 2, 1), ("ranks", 1 if shared else 4, 3, 2)):
        count = small if size < 1 << 20 else large if size < MOST_TIMED else block
        if over == "ranks" and shared and size >= 1 << 20:
            count = 0  # every byte would leave a host as often as it has ranks
        if over == "hosts" and size <= LADDER[0]:
            count = 0  # a single element is carried by one rank of a host, as by a leader
        ours = [name for name in prices if not name.endswith(NATIVE) and Choice.parse(name).over == over]
        if size < 1 << 16:  # nothing to cut in pieces
            ours = [name for name in ours if Choice.parse(name).segments == 1]
        ways.append(sorted(ours, key=lambda choice: predicted_at(size, prices[choice]))[:count])
    if size < 1 << 16 and _FEWEST in prices and _FEWEST not in ways[0]:
        ways[0].append(_FEWEST)
    if size >= 1 << 20:
        ways = [ways[1], ways[0], ways[2]]
    found = [name for names in itertools.zip_longest(*ways) for name in names if name is not None]
    return [NATIVE, *found, *([f"hosts/{NATIVE}"] if shared else [])]

"""The states that were found, by number, and the ways between them: how one was come to, and which lead nowhere."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Key = tuple[Any, ...]


class Graph:
    """States in the order in which they were found."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._waits: list[str] = []
        self._names: list[str] = []
        self._from, self._sources, self._targets = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, key: Key) -> int | None:
        """Return a state's number; None: it was not found yet."""
        return self._numbers.get(key)

    def add(self, key: Key, waits: str, source: int, name: str) -> int:
        """Add a state; return its number.

        Args:
            key: The state's.
            waits: Who is not at an end in it, in words; "": nobody.
            source: The state it was come from; -1: none.
            name: What led to it.
        """
        self._numbers[key] = number = len(self._numbers)
        self._waits.append(sys.intern(waits))
        self._names.append(sys.intern(name))
        self._from.append(source)
        return number

    def join(self, source: int, target: int) -> None:
        """Note that one state leads on to another without a further fault."""
        self._sources.append(source)
        self._targets.append(target)

    def way(self, number: int) -> list[str]:
        """Return what leads to a state, from the beginning on."""
        names = []
        while number >= 0:
            names.append(self._names[number])
            number = self._from[number]
        return names[::-1]

    def lost(self) -> tuple[str, ...]:
        """Return a state from which nobody's end is ever reached without a further fault: who waits, and the way to it.

        Of several the one with the shortest way; (): there is none.
        """
        ended = np.array([not waits for waits in self._waits])
        reached = _reaching(ended, np.frombuffer(self._sources, np.int64), np.frombuffer(self._targets, np.int64))
        stuck = np.flatnonzero(~reached)
        if not len(stuck):
            return ()
        first = int(stuck[0])
        return (f"no way leads to the end any more: {self._waits[first]}", *self.way(first))


def _reaching(goals: NDArray[np.bool_], sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which vertices [n] reach a goal, itself among them, over edges `sources` → `targets` [m]."""
    order = np.argsort(targets, kind="stable")
    come_from = sources[order]
    bounds = np.searchsorted(targets[order], np.arange(len(goals) + 1))
    reached: NDArray[np.bool_] = goals.copy()
    fresh: Sequence[int] | NDArray[np.int64] = np.flatnonzero(goals)
    while len(fresh):
        near = np.concatenate([come_from[bounds[at] : bounds[at + 1]] for at in fresh])
        fresh = np.unique(near[~reached[near]])
        reached[fresh] = True
    return reached


__all__ = ["Graph", "Key"]

"""An explicit-state model checker for the very state machine of `protocol/__init__.py`: every order of what can happen.

A state is: every process's machine and the register call it has under way, what stands in the registers, and the
messages sent so far (each can arrive at any time, more than once, or never). From it everything leads on that can
happen next: a process carries out its next register call, or is given the answer (so both others and a crash can come
in between), a message arrives, an exchange whose members all take part ends, a clock ticks, a process crashes, is
suspected, wrongly too, or comes back with a new epoch, a link falls silent for good (`checker_links.py`), a result is
another than it should be, a message of no member or of another incarnation comes. A stopped
process is one that nothing happens to for long. What only concerns the process itself is done at once: no order of it
could be told from another.

When all states are known, each of them must lead on to one in which nobody waits, without a further fault.

The all-reduce is one event here (the simulation walks schedules), results come as digests, and times are
left out: patience may end at any moment, which is what wrong suspicions stand for.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.survive.protocol.settings import Rules
from verification.survive.checker_state import Bounds, Broken, State
from verification.survive.checker_transitions import Move, Moves, waits

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


@dataclass(frozen=True)
class Explored:
    """What was looked at.

    Args:
        bounds: How much could happen.
        states: Different states.
        transitions: Ways from one to another.
        complete: Nothing was left out within the bounds.
        broken: What must not be and is, in words, and how it came about.
    """

    bounds: Bounds
    states: int
    transitions: int
    complete: bool
    broken: tuple[str, ...] = ()


def explore(bounds: Bounds, rules: Rules | None = None) -> Explored:
    """Look at every state that can be reached.

    Args:
        bounds: How much may happen.
        rules: Of the state machine; None: all are kept.
    """
    search = _Search(Moves(bounds, rules or Rules()))
    broken: tuple[str, ...] = ()
    try:
        while search.queue and len(search.graph) < bounds.most_states:
            search.look_from(*search.queue.popleft())
    except Broken as found:
        broken = (str(found), *search.way())
    whole = not search.queue and not broken
    broken = search.graph.lost() if whole else broken
    return Explored(bounds, len(search.graph), search.transitions, whole and not broken, broken)


class _Search:
    """Breadth first, so that the way to what is broken is a shortest one.

    Args:
        moves: What can happen.

    Attributes:
        queue: States that were not looked from yet, with their numbers.
        graph: All that were found.
        transitions: Ways from one state to another.
    """

    def __init__(self, moves: Moves) -> None:
        begin = moves.begin()
        self.graph = Graph()
        self.queue = deque([(self.graph.add(begin.key, waits(begin), -1, "begin"), begin)])
        self.transitions = 0
        self._moves, self._at, self._by = moves, 0, ""

    def look_from(self, number: int, state: State) -> None:
        """Find everything that a state leads to; raise `Broken` if that must not be."""
        self._at = number
        for move in self._moves.moves(state):
            self._by = move.name
            self._come_to(move.make(), move)

    def _come_to(self, state: State, move: Move) -> None:
        self.transitions += 1
        key = state.key
        number = self.graph.number(key)
        if number is None:
            number = self.graph.add(key, waits(state), self._at, move.name)
            self.queue.append((number, state))
        if not move.fault:
            self.graph.join(self._at, number)

    def way(self) -> list[str]:
        """Return how the move that was made last was come to, from the beginning on."""
        return [*self.graph.way(self._at), self._by]


__all__ = ["Bounds", "Explored", "Graph", "explore"]

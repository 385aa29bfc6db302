"""An explicit-state model checker for the very state machine of `protocol/__init__.py`: every order of what can happen.

A state is: every process's machine and the register call it has under way, what stands in the registers, and the
messages sent so far (each can arrive at any time, more than once, or never). From it everything leads on that can
happen next: a process carries out its next register call, or is given the answer (so both others and a crash can come
in between), a message arrives, an exchange whose members all take part ends, a clock ticks, a process crashes, is
suspected, wrongly too, or comes back with a new epoch, a link falls silent for good (`Links`), a result is
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

from verification.survive.broken_rules import Rules
from verification.survive.checker_state import Bounds, Broken
from verification.survive.checker_transitions import Moves, who_waits

Key = tuple[Any, ...]


class Graph:
    """States in the order in which they were found, by number; of a state only its key is kept."""

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
        # Millions of states share a few hundred texts.
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
        reached = _which_reach(ended, np.frombuffer(self._sources, np.int64), np.frombuffer(self._targets, np.int64))
        stuck = np.flatnonzero(~reached)
        if not len(stuck):
            return ()
        first = int(stuck[0])
        return (f"no way leads to the end any more: {self._waits[first]}", *self.way(first))


def _which_reach(goals: NDArray[np.bool_], sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which vertices [n] reach a goal, itself among them, over edges `sources` → `targets` [m]."""
    # Edges by target: those that end at vertex v come from `come_from[bounds[v] : bounds[v + 1]]`.
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
    moves = Moves(bounds, rules or Rules())
    begin = moves.begin()
    graph, transitions = Graph(), 0
    # Breadth first, so that the way to what is broken is a shortest one.
    queue = deque([(graph.add(begin.key, who_waits(begin), -1, "begin"), begin)])
    broken: tuple[str, ...] = ()
    try:
        while queue and len(graph) < bounds.most_states:
            source, state = queue.popleft()
            for move in moves.moves(state):
                after = move.make()
                transitions += 1
                key = after.key
                target = graph.number(key)
                if target is None:
                    target = graph.add(key, who_waits(after), source, move.name)
                    queue.append((target, after))
                if not move.fault:  # an end that only a fault leads to does not count
                    graph.join(source, target)
    except Broken as found:
        broken = (str(found), *graph.way(source), move.name)
    complete = not queue and not broken
    broken = graph.lost() if complete else broken  # progress can be judged only of the whole graph
    return Explored(bounds, len(graph), transitions, complete and not broken, broken)


__all__ = ["Bounds", "Explored", "Graph", "explore"]

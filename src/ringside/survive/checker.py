"""An explicit-state model checker for the very state machine of `protocol.py`: every order of what can happen.

A state is: every process's machine and the register call it has under way, what stands in the registers, and the
messages sent so far (each can arrive at any time, more than once, or never). From it everything leads on that can
happen next: a process carries out its next register call, or is given the answer (so both others and a crash can come
in between), a message arrives, an exchange whose members all take part ends, a clock ticks, a process crashes, is
suspected, wrongly too, or comes back with a new epoch. A stopped process is one that nothing happens to for long.
What only concerns the process itself is done at once: no order of it could be told from another.

The all-reduce is one event here (the simulation in `proof/` walks schedules), results are always right, and times are
left out: patience may end at any moment, which is what wrong suspicions stand for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from ringside.survive.checker_moves import Bounds, Broken, Moves, State
from ringside.survive.settings import Rules

Key = tuple[Any, ...]


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
        while search.queue and len(search.ways) < bounds.most_states:
            search.look_from(search.queue.popleft())
    except Broken as found:
        broken = (str(found), *search.way())
    complete = not search.queue and not broken
    return Explored(bounds, len(search.ways), search.transitions, complete, broken)


class _Search:
    """Breadth first, so that the way to what is broken is a shortest one.

    Args:
        moves: What can happen.

    Attributes:
        queue: States that were not looked from yet.
        ways: By a state's key, the key it was come from, and by what.
        transitions: Ways from one state to another.
    """

    def __init__(self, moves: Moves) -> None:
        begin = moves.begin()
        self.queue = deque([begin])
        self.ways: dict[Key, tuple[Key | None, str]] = {begin.key: (None, "begin")}
        self.transitions = 0
        self._moves, self._at, self._by = moves, begin.key, ""

    def look_from(self, state: State) -> None:
        """Find everything that a state leads to; raise `Broken` if that must not be, or if it leads nowhere."""
        self._at, moved = state.key, False
        for name, move in self._moves.moves(state):
            self._by = name
            moved |= self._come_to(move(), name)
        self._by = "and nothing more"
        if not moved:
            self._moves.check_end(state)

    def _come_to(self, state: State, name: str) -> bool:
        """Note a state; return whether it is another than the one it was come from."""
        self.transitions += 1
        key = state.key
        if key not in self.ways:
            self.ways[key] = (self._at, name)
            self.queue.append(state)
        return key != self._at

    def way(self) -> list[str]:
        """Return how the move that was made last was come to, from the beginning on."""
        names = [self._by]
        at: Key | None = self._at
        while at is not None:
            at, name = self.ways[at]
            names.append(name)
        return names[::-1]


__all__ = ["Bounds", "Explored", "explore"]

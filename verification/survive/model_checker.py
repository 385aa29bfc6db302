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

from collections import deque
from dataclasses import dataclass

from ringside.survive.protocol.settings import Rules
from verification.survive.checker_graph import Graph
from verification.survive.checker_state import Bounds, Broken, State
from verification.survive.checker_transitions import Move, Moves, waits


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


__all__ = ["Bounds", "Explored", "explore"]

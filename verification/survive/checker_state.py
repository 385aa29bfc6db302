"""What the model checker knows at one moment: processes, registers, messages, links; and how much may happen.

States are values: a move returns another one. Two states with equal keys go on equally, so the search looks at one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ringside.survive.all_reduce.between_hosts import cut_off, way_around
from ringside.survive.protocol import Member, MemberPhase
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Decision, MemberId, Tag
from ringside.survive.protocol.generation import Generation, Link

Place = tuple[int, int, int]  # incarnation, step, generation
Call = i.Instruction | e.Event  # a register call to be made, or its answer to be given
# Places in `State.left`, in the order of `Bounds`.
CRASHES, MISTAKES, RETURNS, RETRIES, CUTS, QUITS, DRAINS, DIFFERENCES = range(8)


@dataclass(frozen=True)
class Bounds:
    """How much may happen.

    Args:
        ranks: Processes that begin.
        steps: Steps of the job.
        crashes: How many processes crash.
        mistakes: How many that live are suspected.
        returns: How many come back after a crash, or after having been left out.
        retries: How many exchanges fail though nobody is at fault.
        cuts: How many links between two ranks fall silent for good, both of which may live.
        quits: How many ranks want no further step before the last one.
        drains: How many ranks are drained.
        differences: How many results are other than they should be.
        foreign: Messages may come at any time that are not this job's: of no member, or of another incarnation.
        gives_up: Whoever has no state may take everybody else for dead, at any time, and give the incarnation up.
        most_states: Where to stop looking.
    """

    ranks: int = 2
    steps: int = 1
    crashes: int = 1
    mistakes: int = 0
    returns: int = 0
    retries: int = 0
    cuts: int = 0
    quits: int = 0
    drains: int = 0
    differences: int = 0
    foreign: bool = False
    gives_up: bool = False
    most_states: int = 200_000


class Broken(Exception):
    """Something that must not be."""


# --------------------------------------------------------------------------------------------------
# Links

Waiting = Sequence[tuple[Tag, MemberId, Generation, bool]]
"""Whose exchange is under way: the attempt, who, its generation, and whether all members have come to it."""


class Links(NamedTuple):
    """What has become of the links between ranks.

    A link falls silent once and for good: nobody is told, both ends may live and go on, and the registers are reached
    as before. What was on its way over it is lost, so of an exchange that all had come to, some members still get their
    result and others never will, one end of the link among them; a later one over that link gives nobody a result. Only
    an end that waits finds out. An acknowledgement that is sent first goes over the link as well, and so does state.

    Args:
        silent: Those that carry nothing, ascending.
        passed: Attempts to which all had come before a link that they use fell silent.
        starved: (attempt, who never gets its result) of those.
    """

    silent: tuple[Link, ...] = ()
    passed: frozenset[Tag] = frozenset()
    starved: frozenset[tuple[Tag, MemberId]] = frozenset()

    def connect(self, a: MemberId, b: MemberId) -> bool:
        """Tell whether there is a connection between two processes."""
        return link_of(a, b) not in self.silent

    def give(self, tag: Tag, seat: MemberId, generation: Generation) -> bool:
        """Tell whether the exchange of an attempt that all have come to ends for a member."""
        if cut_off(generation) if generation.broken else ():
            return False
        whole = not self.silent or used_by(generation).isdisjoint(self.silent)
        return whole or (tag in self.passed and (tag, seat) not in self.starved)

    def fates(self, link: Link, waiting: Waiting) -> Iterator[Links]:
        """Yield what can become of the links when another one falls silent."""
        on_it = [each for each in waiting if link in used_by(each[2])]
        passing = [(tag, seat) for tag, seat, record, all_there in on_it if all_there and self.give(tag, seat, record)]
        tags = sorted({tag for tag, _ in passing})
        silent, passed = tuple(sorted((*self.silent, link))), self.passed.union(tags)
        choices = []
        for tag in tags:
            seats = [seat for of, seat in passing if of == tag]
            some = (chosen for size in range(1, len(seats) + 1) for chosen in itertools.combinations(seats, size))
            # What was lost on the link left one of its ends without a result, if it left anybody.
            choices.append([(), *(chosen for chosen in some if any(seat.rank in link for seat in chosen))])
        for chosen in itertools.product(*choices):
            lost = {(tag, seat) for tag, seats in zip(tags, chosen, strict=True) for seat in seats}
            yield Links(silent, passed, self.starved | lost)


def link_of(a: MemberId, b: MemberId) -> Link:
    """Return the link between the ranks of two processes."""
    low, high = sorted((a.rank, b.rank))
    return low, high


@cache
def used_by(generation: Generation) -> frozenset[Link]:
    """Return the links that a generation's sums pass by."""
    return frozenset(way_around(generation).joins(generation.ranks))


# --------------------------------------------------------------------------------------------------
# Processes, and everything


class Node(NamedTuple):
    """One process.

    Args:
        member: Its state machine; never changed.
        number: Stands for the machine's key: equal for machines that go on equally.
        todo: Register calls to be made and answers to be given, in order.
        alive: It has not crashed.
        state: The step that the weights it really has are good for; -1: none.
        done: It has come to what its script does after the last step.
        lost: The attempt whose acknowledgement a silent link has swallowed; repeated, it goes by the store.
    """

    member: Member
    number: int
    todo: tuple[Call, ...] = ()
    alive: bool = True
    state: int = 0
    lost: Tag | None = None
    done: bool = False

    @property
    def seat(self) -> MemberId:
        """Which process."""
        return self.member.seat

    @property
    def ended(self) -> bool:
        """Whether its machine is at an end."""
        return self.member.phase is MemberPhase.ENDED

    @property
    def members(self) -> tuple[MemberId, ...]:
        """Whom it takes part with."""
        return self.member.members

    @property
    def key(self) -> tuple[Any, ...]:
        """What its further behaviour depends on."""
        return (self.number, self.todo, self.alive, self.state, self.lost, self.done)


class State(NamedTuple):
    """Everything.

    Args:
        nodes: Every process there ever was.
        records: By incarnation, what stands in the generation register.
        decisions: What is decided about every step of a generation.
        messages: (to which process, what it is told), of all that were sent so far.
        taking_part: (attempt, who has begun its exchange).
        copies: (attempt, who has made a private copy).
        left: What may still happen: crashes, mistakes, returns, retries, cuts, quits, drains, differences.
        links: Those that carry nothing.
        given_up: Somebody was told to open the next incarnation.
        kept: (rank, step of the state), of what outlives the processes of a rank.
        gone: Ranks that have no process any more and get none.
        late: Ranks that came to the end and could not have the final state.
    """

    nodes: tuple[Node, ...]
    records: tuple[tuple[int, Generation], ...] = ()
    decisions: tuple[tuple[Place, Decision], ...] = ()
    messages: frozenset[tuple[int, e.Event]] = frozenset()
    taking_part: frozenset[tuple[Tag, MemberId]] = frozenset()
    copies: frozenset[tuple[Tag, MemberId]] = frozenset()
    left: tuple[int, ...] = (0,) * 8
    links: Links = Links()
    given_up: bool = False
    kept: tuple[tuple[int, int], ...] = ()
    gone: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for states that go on equally."""
        nodes = tuple(node.key for node in self.nodes)
        registers = (self.records, self.decisions)
        events = (self.messages, self.taking_part, self.copies)
        return (nodes, registers, *events, self.left, self.links, self.given_up, self.kept, self.gone, self.late)

    def put(self, index: int, node: Node) -> State:
        """Return this with another process in a place."""
        return self._replace(nodes=(*self.nodes[:index], node, *self.nodes[index + 1 :]))

    def spend(self, which: int) -> State:
        """Return this with one less left of what may happen."""
        return self._replace(left=tuple(n - (k == which) for k, n in enumerate(self.left)))

    def answer(self, index: int, event: e.Event) -> State:
        """Return this with an answer in place of the register call that a process made."""
        node = self.nodes[index]
        return self.put(index, node._replace(todo=(event, *node.todo[1:])))

    def send(self, to: MemberId, event: e.Event) -> State:
        """Return this with a message under way; to nobody, if there is no such process."""
        index = next((k for k, node in enumerate(self.nodes) if node.seat == to), None)
        return self if index is None else self._replace(messages=self.messages | {(index, event)})


def place_of(tag: Tag) -> Place:
    """Return what is decided: a step of a generation."""
    return tag.incarnation, tag.step, tag.generation


__all__ = [
    "CRASHES",
    "CUTS",
    "DIFFERENCES",
    "DRAINS",
    "MISTAKES",
    "QUITS",
    "RETRIES",
    "RETURNS",
    "Bounds",
    "Broken",
    "Call",
    "Links",
    "Node",
    "Place",
    "State",
    "link_of",
    "place_of",
    "used_by",
]

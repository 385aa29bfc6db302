"""What can happen in a small job, one thing at a time: the states that `checker.py` goes through, and the ways on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.decision import Abort, Commit, Decision, Seat, Tag
from ringside.survive.generation import Generation
from ringside.survive.protocol import Member, Phase
from ringside.survive.settings import Rules, Settings

Place = tuple[int, int, int]  # incarnation, step, generation
Call = i.Instruction | e.Event  # a register call to be made, or its answer to be given


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
        gives_up: Whoever has no state may take everybody else for dead, at any time, and give the incarnation up.
        most_states: Where to stop looking.
    """

    ranks: int = 2
    steps: int = 1
    crashes: int = 1
    mistakes: int = 0
    returns: int = 0
    retries: int = 0
    gives_up: bool = False
    most_states: int = 200_000


class Broken(Exception):
    """Something that must not be."""


class Node(NamedTuple):
    """One process.

    Args:
        member: Its state machine; never changed.
        number: Stands for the machine's key: equal for machines that go on equally.
        todo: Register calls to be made and answers to be given, in order.
        alive: It has not crashed.
        state: The step that the weights it really has are good for; -1: none.
    """

    member: Member
    number: int
    todo: tuple[Call, ...] = ()
    alive: bool = True
    state: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What its further behaviour depends on."""
        return (self.number, self.todo, self.alive, self.state)


class State(NamedTuple):
    """Everything."""

    nodes: tuple[Node, ...]
    records: tuple[tuple[int, Generation], ...] = ()
    decisions: tuple[tuple[Place, Decision], ...] = ()
    messages: frozenset[tuple[int, e.Event]] = frozenset()
    taking_part: frozenset[tuple[Tag, Seat]] = frozenset()
    copies: frozenset[tuple[Tag, Seat]] = frozenset()
    left: tuple[int, int, int, int] = (0, 0, 0, 0)  # crashes, mistakes, returns, retries
    given_up: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for states that go on equally."""
        nodes = tuple(node.key for node in self.nodes)
        registers = (self.records, self.decisions)
        return (nodes, registers, self.messages, self.taking_part, self.copies, self.left, self.given_up)


Move = tuple[str, Callable[[], State]]


@dataclass
class Moves:
    """What can happen in a state, and what must not.

    Args:
        bounds: How much may happen.
        rules: Of the state machine.
    """

    bounds: Bounds
    rules: Rules
    settings: Settings = field(init=False)
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        long = 1e12  # ticks repeat what was asked; patience is what wrong suspicions stand for
        self.settings = Settings(
            micro_batches=self.bounds.ranks,
            samples=lambda step: (step, 1),
            steps=self.bounds.steps,
            retry_s=1.0,
            patience_s=long,
            fetch_patience_s=long,
            store_patience_s=long,
            rules=self.rules,
        )

    def begin(self) -> State:
        """Return the state in which all processes have just been started."""
        seats = tuple(Seat(rank, 1) for rank in range(self.bounds.ranks))
        b = self.bounds
        state = State((), left=(b.crashes, b.mistakes, b.returns, b.retries))
        for seat in seats:
            state = self._add(state, seat, e.Started(0.0, 0, seats))
        return state

    def _add(self, state: State, seat: Seat, started: e.Started) -> State:
        member = Member(seat, 1, self.settings)
        node = Node(member, self._number(member), state=-1 if started.step is None else started.step)
        at = len(state.nodes)
        return self._tell(state._replace(nodes=(*state.nodes, node)), at, started)

    # ------------------------------------------------------------------------------------------ what can happen

    def moves(self, state: State) -> Iterator[Move]:
        """Yield everything that can happen next."""
        for at, node in enumerate(state.nodes):
            if not node.alive:
                continue
            ended = node.member.phase is Phase.ENDED
            if not ended:
                yield from self._own_moves(state, at, node)
                yield from self._deliveries(state, at, node)
            if state.left[0]:
                yield f"{node.member.seat} crashes", partial(self._crash, state, at)
        yield from self._returns(state)

    def _own_moves(self, state: State, at: int, node: Node) -> Iterator[Move]:
        seat = node.member.seat
        if node.todo:
            yield f"{seat}: {type(node.todo[0]).__name__}", partial(self._next_call, state, at)
        else:
            yield f"{seat}: tick", partial(self._tell, state, at, e.Tick(node.member.now + 2.0))
        if self.bounds.gives_up and node.member.step is None and node.member.phase is not Phase.FENCING:
            yield f"{seat} finds nobody", partial(self._tell, state, at, e.NobodyLeft())
        tag = node.member.tag
        if node.member.phase is not Phase.EXCHANGING or tag is None:
            return
        if all((tag, other) in state.taking_part for other in _members(node)):
            yield f"{seat}: result of {tag}", partial(self._result, state, at, tag)
        if state.left[3]:
            yield f"{seat}: exchange fails", partial(self._tell, _spend(state, 3), at, e.AttemptFailed(tag))

    def _deliveries(self, state: State, at: int, node: Node) -> Iterator[Move]:
        seat = node.member.seat
        for to, event in state.messages:
            if to == at:
                yield f"{seat}: {type(event).__name__}", partial(self._tell, state, at, event)
        for peer in state.nodes:
            other = peer.member.seat
            if other not in _members(node) or other == seat or other in node.member.wishes.suspects:
                continue
            if not peer.alive or peer.member.phase is Phase.ENDED:
                yield f"{seat} sees that {other} is gone", partial(self._tell, state, at, e.PeerSuspected(other))
            elif state.left[1]:
                yield f"{seat} suspects {other}", partial(self._tell, _spend(state, 1), at, e.PeerSuspected(other))

    def _crash(self, state: State, at: int) -> State:
        node = state.nodes[at]
        return _put(_spend(state, 0), at, node._replace(alive=False, todo=()))

    def _returns(self, state: State) -> Iterator[Move]:
        for node in state.nodes:
            seat = node.member.seat
            latest = seat.epoch == max(n.member.seat.epoch for n in state.nodes if n.member.seat.rank == seat.rank)
            gone = not node.alive or (node.member.phase is Phase.ENDED and node.member.step != self.bounds.steps)
            if state.left[2] and latest and gone:
                back = Seat(seat.rank, seat.epoch + 1)
                yield f"{back} begins", partial(self._add, _spend(state, 2), back, e.Started(0.0))

    def check_end(self, state: State) -> None:
        """Raise `Broken` if somebody waits in a state that nothing leads on from."""
        for node in state.nodes:
            if node.alive and node.member.phase not in (Phase.ENDED, Phase.OUTSIDE):
                raise Broken(f"{node.member.seat} is {node.member.phase.value} for ever")

    # ------------------------------------------------------------------------------------------ doing it

    def _number(self, member: Member) -> int:
        return self._numbers.setdefault(member.key, len(self._numbers))

    def _tell(self, state: State, at: int, event: e.Event) -> State:
        node = state.nodes[at]
        member = copy.copy(node.member)
        found = member.handle(event)
        state = _put(state, at, node._replace(member=member, number=self._number(member)))
        for instruction in found:
            state = self._carry_out(state, at, instruction)
        return state

    def _carry_out(self, state: State, at: int, instruction: i.Instruction) -> State:
        """Do what concerns only the process, or adds a message; put register calls in line."""
        node = state.nodes[at]
        me = node.member.seat
        match instruction:
            case i.Compute(tag):
                return self._tell(state, at, e.WorkDone(tag)) if tag == node.member.tag else state
            case i.Exchange(tag):
                return state._replace(taking_part=state.taking_part | {(tag, me)})
            case i.PublishAck(ack, to):
                return _send(state, to, e.AckSeen(ack))
            case i.AskToJoin(seat):
                for peer in state.nodes:
                    state = state if peer.member.seat == me else _send(state, peer.member.seat, e.JoinRequested(seat))
                return state
            case i.OfferState(tag, joining):
                offer = e.StateOffered(e.Offer(tag, me, str(node.state)))
                for seat in _members(node):
                    state = _send(state, seat, offer) if seat.rank in joining else state
                return state
            case i.FetchState(source, tag):
                return self._fetch(state, at, source, tag)
            case i.Apply(tag):
                return self._apply(state, at, tag)
            case i.Discard() | i.Leave():
                self._throws_away(state, node)
                return state
            case i.OpenIncarnation():
                return state._replace(given_up=True)
            case i.Settle() | i.Checkpoint() | i.Finish() | i.Halt():
                return state
        return _put(state, at, node._replace(todo=(*node.todo, instruction)))

    def _fetch(self, state: State, at: int, source: Seat, tag: Tag) -> State:
        peer = next(n for n in state.nodes if n.member.seat == source)
        if not peer.alive:
            return self._tell(state, at, e.FetchFailed(tag))
        got = _put(state, at, state.nodes[at]._replace(state=peer.state))
        return self._tell(got, at, e.StateFetched(tag, str(peer.state)))

    def _result(self, state: State, at: int, tag: Tag) -> State:
        node = state.nodes[at]
        held = state._replace(copies=state.copies | {(tag, node.member.seat)})
        return self._tell(held, at, e.ResultReady(tag, "sum", str(node.state)))

    def _apply(self, state: State, at: int, tag: Tag) -> State:
        node = state.nodes[at]
        stands = dict(state.decisions).get(_place(tag))
        if not isinstance(stands, Commit):
            raise Broken(f"{node.member.seat} applies {tag} without COMMIT")
        if node.state != tag.step:
            raise Broken(f"{node.member.seat} applies {tag} to the state of step {node.state}")
        return _put(state, at, node._replace(state=tag.step + 1))

    def _throws_away(self, state: State, node: Node) -> None:
        decisions = dict(state.decisions)
        for tag, seat in state.copies:
            stands = decisions.get(_place(tag))
            if seat == node.member.seat and tag.step == node.state and isinstance(stands, Commit):
                raise Broken(f"{seat} throws the result of {tag} away, and it is committed")

    def _next_call(self, state: State, at: int) -> State:
        """Make the register call that is next, or give the answer to the one that was made."""
        node = state.nodes[at]
        call, rest = node.todo[0], node.todo[1:]
        match call:
            case i.ReadGeneration():
                return _answer(state, at, e.GenerationRead(dict(state.records).get(node.member.incarnation)))
            case i.ProposeGeneration(expected, new):
                return self._swap(state, at, expected, new)
            case i.TryCommit(tag, decision):
                return self._create(state, at, tag, decision)
            case i.TryAbort(tag, generation):
                return self._create(state, at, tag, Abort(generation))
            case i.ReadDecision(tag):
                return _answer(state, at, e.DecisionRead(tag, dict(state.decisions).get(_place(tag))))
            case e.GenerationRead() | e.DecisionRead():
                return self._tell(_put(state, at, node._replace(todo=rest)), at, call)
        raise Broken(f"{type(call).__name__} is no register call")

    def _swap(self, state: State, at: int, expected: Generation | None, new: Generation) -> State:
        records = dict(state.records)
        if records.get(new.incarnation) == expected:
            records[new.incarnation] = new
            state = state._replace(records=tuple(sorted(records.items(), key=lambda item: item[0])))
        return _answer(state, at, e.GenerationRead(records.get(new.incarnation)))

    def _create(self, state: State, at: int, tag: Tag, decision: Decision) -> State:
        decisions = dict(state.decisions)
        stands = decisions.setdefault(_place(tag), decision)
        if stands is decision and isinstance(decision, Commit):
            self._committed(state, tag, decision)
        if stands is decision:
            state = state._replace(decisions=tuple(sorted(decisions.items(), key=lambda item: item[0])))
        return _answer(state, at, e.DecisionRead(tag, stands))

    def _committed(self, state: State, tag: Tag, commit: Commit) -> None:
        if state.given_up:
            raise Broken(f"{tag} is committed, and its incarnation was given up")
        for seat in commit.members:
            if (tag, seat) not in state.copies:
                raise Broken(f"{tag} is committed, and {seat} holds no copy")
        for (incarnation, step, generation), decision in state.decisions:
            if isinstance(decision, Commit) and (incarnation, step) == (tag.incarnation, tag.step):
                raise Broken(f"{tag} is committed, and was in generation {generation}")


def _members(node: Node) -> tuple[Seat, ...]:
    return () if node.member.generation is None else node.member.generation.members


def _place(tag: Tag) -> Place:
    return tag.incarnation, tag.step, tag.generation


def _put(state: State, at: int, node: Node) -> State:
    return state._replace(nodes=(*state.nodes[:at], node, *state.nodes[at + 1 :]))


def _spend(state: State, which: int) -> State:
    return state._replace(left=tuple(n - (k == which) for k, n in enumerate(state.left)))  # type: ignore[arg-type]


def _answer(state: State, at: int, answer: e.Event) -> State:
    node = state.nodes[at]
    return _put(state, at, node._replace(todo=(answer, *node.todo[1:])))


def _send(state: State, to: Seat, event: e.Event) -> State:
    at = next((k for k, node in enumerate(state.nodes) if node.member.seat == to), None)
    return state if at is None else state._replace(messages=state.messages | {(at, event)})


__all__ = ["Bounds", "Broken", "Moves", "State"]

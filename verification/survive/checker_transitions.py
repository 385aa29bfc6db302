"""What can happen in a small job, one thing at a time: the ways on from a state, and where each of them leads.

`Moves.moves` lists them. The second half carries out what the state machine of a process then asks for, and raises
`Broken` where that must not be: a COMMIT without every copy, an apply without COMMIT, a copy of a commit that is
dropped, an end without the final state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from msgspec.structs import replace

from ringside.survive.all_reduce.between_hosts import blamed, cut_off
from ringside.survive.protocol import Member, MemberPhase
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Abort, Commit, Decided, Decision, MemberId, Tag
from ringside.survive.protocol.generation import Generation, Link
from ringside.survive.protocol.settings import ProtocolSettings
from verification.survive.broken_rules import Rules, machine
from verification.survive.checker_state import (
    CRASHES,
    CUTS,
    DIFFERENCES,
    DRAINS,
    MISTAKES,
    QUITS,
    RETRIES,
    RETURNS,
    Bounds,
    Broken,
    Node,
    State,
    link_of,
    place_of,
    used_by,
)


class Move(NamedTuple):
    """Something that can happen.

    Args:
        name: In words.
        make: Returns the state that it leads to.
        fault: It is one of those that only so many of may happen.
    """

    name: str
    make: Callable[[], State]
    fault: bool = False


MOST_ATTEMPTS = 6
"""So little may happen that whoever begins a step more often than that would do so for ever."""
# Phases in which a process sends over links: sums, state, or that it wants to be a member.
_SENDING = (MemberPhase.EXCHANGING, MemberPhase.FETCHING, MemberPhase.OUTSIDE)


# What a machine's behaviour does not depend on here: the same for all, and the time.
_UNCOUNTED = {"settings", "now", "since", "asked", "unanswered"}


@dataclass
class Moves:
    """What can happen in a state, and what must not.

    Args:
        bounds: How much may happen.
        rules: Of the state machine.
    """

    bounds: Bounds
    rules: Rules
    settings: ProtocolSettings = field(init=False)
    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        long = 1e12  # ticks repeat what was asked; patience is what wrong suspicions stand for
        self.settings = ProtocolSettings(
            micro_batches=self.bounds.ranks,
            samples=lambda step: (step, 1),
            steps=self.bounds.steps,
            ranks=self.bounds.ranks,
            most_attempts=MOST_ATTEMPTS,
            retry_s=1.0,
            patience_s=long,
            fetch_patience_s=long,
            end_patience_s=long,
            store_patience_s=long,
        )

    def begin(self) -> State:
        """Return the state in which all processes have just been started."""
        seats = tuple(MemberId(rank, 1) for rank in range(self.bounds.ranks))
        state = State((), left=self._all_left())
        for seat in seats:
            state = self._add(state, seat, e.Started(0.0, 0, seats))
        return state

    def _all_left(self) -> tuple[int, ...]:
        b = self.bounds
        return (b.crashes, b.mistakes, b.returns, b.retries, b.cuts, b.quits, b.drains, b.differences)

    def _add(self, state: State, seat: MemberId, started: e.Started) -> State:
        member = machine(self.rules, Member)(seat, 1, self.settings)
        node = Node(member, self._number(member), state=-1 if started.step is None else started.step)
        place = len(state.nodes)
        return self._handle(state._replace(nodes=(*state.nodes, node)), place, started)

    # ------------------------------------------------------------------------------------------ what can happen

    def moves(self, state: State) -> Iterator[Move]:
        """Yield everything that can happen next."""
        for place, node in enumerate(state.nodes):
            if not node.alive:
                continue
            if not node.ended:
                yield from self._own_moves(state, place, node)
                yield from self._deliveries(state, place, node)
                if self.bounds.foreign:
                    yield from self._foreign(state, place, node)
            if state.left[CRASHES]:
                crashed = node._replace(alive=False, todo=())
                yield Move(f"{node.seat} crashes", partial(state.spend(CRASHES).put, place, crashed), True)
        for node in state.nodes if state.left[RETURNS] else ():
            # The last process of a rank comes back with a new epoch, unless it is done or is not waited for any more.
            rank, epoch = node.seat.rank, node.seat.epoch
            latest = epoch == max(other.seat.epoch for other in state.nodes if other.seat.rank == rank)
            gone = not node.alive or (node.ended and not node.done)
            gone = gone and rank not in state.gone | state.late
            if latest and gone:
                back = MemberId(rank, epoch + 1)
                yield Move(f"{back} begins", partial(self._add, state.spend(RETURNS), back, e.Started(0.0)), True)
        if state.left[CUTS]:
            yield from self._cuts(state)

    def _own_moves(self, state: State, place: int, node: Node) -> Iterator[Move]:
        """Let a process take its next step: a register call, the clock, the end of its exchange."""
        seat = node.seat
        if node.todo:  # while a call is under way the process waits for it, and its clock stands
            yield Move(f"{seat}: {type(node.todo[0]).__name__}", partial(self._next_call, state, place))
        else:
            yield Move(f"{seat}: tick", partial(self._handle, state, place, e.Tick(node.member.now + 2.0)))
        if self.bounds.gives_up and node.member.step is None and node.member.phase is not MemberPhase.FENCING:
            yield Move(f"{seat} finds nobody", partial(self._handle, state, place, e.NobodyLeft()), True)
        tag = node.member.tag
        yield from self._end_moves(state, place, node)
        if node.member.phase is not MemberPhase.EXCHANGING or tag is None:
            return
        record = node.member.generation
        assert record is not None
        if _all_there(state, node) and state.links.give(tag, seat, record):
            yield Move(f"{seat}: result of {tag}", partial(self._result, state, place, tag))
            if state.left[DIFFERENCES]:
                other = partial(self._result, state.spend(DIFFERENCES), place, tag, "other")
                yield Move(f"{seat}: another result of {tag}", other, True)
        yield from self._silence(state, place, node)
        if state.left[RETRIES]:
            yield Move(
                f"{seat}: exchange fails",
                partial(self._handle, state.spend(RETRIES), place, e.AttemptFailed(tag)),
                True,
            )

    def _end_moves(self, state: State, place: int, node: Node) -> Iterator[Move]:
        """Let a rank want no further step, or be drained, and the leader find out at the end who does not come.

        For one that lives and that it has no link to, its patience ends.
        """
        seat, member = node.seat, node.member
        if state.left[QUITS] and member.phase is MemberPhase.EXCHANGING:
            yield Move(f"{seat} wants to end", partial(self._handle, state.spend(QUITS), place, e.EndWanted()), True)
        if state.left[DRAINS] and member.is_leader and member.phase is MemberPhase.EXCHANGING:
            for rank in range(self.bounds.ranks):
                drained = partial(self._handle, state.spend(DRAINS), place, e.DrainWanted(rank))
                yield Move(f"rank {rank} is to be drained", drained, True)
        if member.phase is not MemberPhase.CLOSING or not member.is_leader:
            return
        able = [peer.seat for peer in state.nodes if peer.alive and not peer.ended]
        there = {other.rank for other in able if other == seat or state.links.connect(seat, other)}
        gone = state.gone | (set(range(self.bounds.ranks)) - there)
        if gone != member.gone:
            known = state._replace(gone=gone)
            yield Move(
                f"{seat} hears who does not come", partial(self._handle, known, place, e.RanksGone(tuple(sorted(gone))))
            )

    def _deliveries(self, state: State, place: int, node: Node) -> Iterator[Move]:
        """Let a message come, or let a process take another member for dead, rightly or by mistake."""
        seat = node.seat
        for to, event in state.messages:
            if to == place:
                # It stays among the messages, so it may come again, or never.
                yield Move(f"{seat}: {type(event).__name__}", partial(self._handle, state, place, event))
        for peer in state.nodes:
            other = peer.seat
            if other not in node.members or other == seat or other in node.member.change.suspects:
                continue
            if not peer.alive or peer.ended:
                yield Move(
                    f"{seat} sees that {other} is gone", partial(self._handle, state, place, e.PeerSuspected(other))
                )
            elif state.left[MISTAKES]:
                suspected = partial(self._handle, state.spend(MISTAKES), place, e.PeerSuspected(other))
                yield Move(f"{seat} suspects {other}", suspected, True)

    def _foreign(self, state: State, place: int, node: Node) -> Iterator[Move]:
        """Let a message come that nobody in this job has sent: an offer of no member, or acknowledgements.

        These are of no member, or of a member's next incarnation, of which there is a generation with the same number.
        Whoever takes no notice is in the same state after it, so this costs hardly a state.
        """
        record = node.member.generation
        if record is None:
            return
        tag, stranger = record.tag(record.step), MemberId(self.bounds.ranks, 1)
        sent: list[e.Event] = []
        if node.member.phase is MemberPhase.FETCHING:
            sent.append(e.StateOffered(e.RankOffered(tag, stranger, str(record.step))))
        if node.member.is_leader:
            elsewhere = [(seat, replace(tag, incarnation=tag.incarnation + 1)) for seat in record.members[1:]]
            sent += [e.AckSeen(e.Acknowledgement(of, seat, "sum")) for seat, of in [(stranger, tag), *elsewhere]]
        for event in sent:
            told = partial(self._handle, state, place, event)
            yield Move(f"{node.seat}: {type(event).__name__} that is not of this job", told, True)

    def _cuts(self, state: State) -> Iterator[Move]:
        """Let a link fall silent that somebody is about to send over: no other moment can be told from that one."""
        waiting = []
        wanted: set[Link] = set()
        for node in state.nodes:
            tag, record, phase = node.member.tag, node.member.generation, node.member.phase
            if not node.alive or phase not in _SENDING:
                continue
            if phase is MemberPhase.EXCHANGING and tag is not None and record is not None:
                waiting.append((tag, node.seat, record, _all_there(state, node)))
                wanted |= used_by(record)
            else:
                ranks = range(self.bounds.ranks)
                wanted |= {link_of(node.seat, MemberId(rank, 0)) for rank in ranks if rank != node.seat.rank}
        for link in sorted(wanted.difference(state.links.silent)):
            for links in state.links.fates(link, waiting):
                yield Move(f"link {link} falls silent", partial(state.spend(CUTS)._replace, links=links), True)

    def _silence(self, state: State, place: int, node: Node) -> Iterator[Move]:
        """Let a member find out that nothing comes over one of its links, or that no way is left."""
        tag, record, seat = node.member.tag, node.member.generation, node.seat
        assert tag is not None
        assert record is not None
        gone = cut_off(record) if record.broken else ()
        if gone and seat not in gone:
            yield Move(
                f"{seat} goes on without others", partial(self._handle, state, place, e.AttemptFailed(tag, gone))
            )
        for other in () if gone else record.members:
            link = link_of(seat, other)
            if other == seat or link not in state.links.silent or link not in used_by(record):
                continue
            lives = any(peer.seat == other and peer.alive and not peer.ended for peer in state.nodes)
            if lives and link not in node.member.change.broken:
                suspects, broken = blamed(record, seat, other)
                failed = e.AttemptFailed(tag, suspects, (broken,))
                yield Move(f"{seat} hears nothing over {link}", partial(self._handle, state, place, failed))

    # ------------------------------------------------------------------------------------------ doing it

    def _number(self, member: Member) -> int:
        """Return a number that two machines share only where they go on equally, whatever the time."""
        known = {name: value for name, value in vars(member).items() if name not in _UNCOUNTED}
        acks = tuple(sorted(known.pop("acks").items()))
        return self._numbers.setdefault((acks, *known.values()), len(self._numbers))

    def _handle(self, state: State, place: int, event: e.Event) -> State:
        """Return the state in which a process has been told something and has done what concerns only itself."""
        node = state.nodes[place]
        member = copy.copy(node.member)  # a machine belongs to a state, and other moves lead on from that one
        found = member.handle(event)
        state = state.put(place, node._replace(member=member, number=self._number(member)))
        for instruction in found:
            state = self._execute(state, place, instruction)
        return state

    def _execute(self, state: State, place: int, instruction: i.Instruction) -> State:
        """Do what concerns only the process, or adds a message; put register calls in line."""
        node = state.nodes[place]
        me = node.seat
        match instruction:
            case i.Compute(tag):
                return self._handle(state, place, e.WorkDone(tag)) if tag == node.member.tag else state
            case i.RunExchange(tag):
                return state._replace(taking_part=state.taking_part | {(tag, me)})
            case i.PublishAck(ack, to):
                if node.lost == ack.tag or state.links.connect(me, to):
                    return state.send(to, e.AckSeen(ack))
                return state.put(place, node._replace(lost=ack.tag))
            case i.AskToJoin(seat):
                record = node.member.newest
                others = [] if record is None else [other for other in record.members if other.rank != me.rank]
                knocks = node.member.phase is MemberPhase.OUTSIDE and others
                if knocks and not any(state.links.connect(me, other) for other in others):
                    return state  # whoever reaches no member does not ask
                for peer in state.nodes:
                    state = state if peer.seat == me else state.send(peer.seat, e.JoinRequested(seat))
                return state
            case i.OfferState(tag, joining):
                offer = e.StateOffered(e.RankOffered(tag, me, str(node.state)))
                for seat in node.members:
                    state = state.send(seat, offer) if seat.rank in joining else state
                return state
            case i.FetchState(source, tag):
                served = next((other for other in state.nodes if other.seat == source), None)
                if served is None:
                    raise Broken(f"{me} fetches state from {source}, who is no member")
                if not served.alive or not state.links.connect(me, source):
                    return self._handle(state, place, e.FetchFailed(tag))
                state = state.put(place, node._replace(state=served.state))
                return self._handle(state, place, e.StateFetched(tag, str(served.state)))
            case i.Apply(tag):
                if not isinstance(dict(state.decisions).get(place_of(tag)), Commit):
                    raise Broken(f"{me} applies {tag} without COMMIT")
                if node.state != tag.step:
                    raise Broken(f"{me} applies {tag} to the state of step {node.state}")
                return state.put(place, node._replace(state=tag.step + 1))
            case i.Discard() | i.Leave():
                # What is committed may be dropped only where it was applied before.
                decisions = dict(state.decisions)
                for tag, owner in state.copies:
                    committed = isinstance(decisions.get(place_of(tag)), Commit)
                    if owner == me and tag.step == node.state and committed:
                        raise Broken(f"{me} throws the result of {tag} away, and it is committed")
                return state
            case i.OpenIncarnation():
                return state._replace(given_up=True)
            case i.Halt(reason):
                raise Broken(f"{me} halts: {reason}")
            case i.KeepState(tag):
                if self.rules.keep_final:
                    kept = {**dict(state.kept), me.rank: node.state}
                    state = state._replace(kept=tuple(sorted(kept.items())))
                return self._handle(state, place, e.StateKept(tag, str(node.state)))
            case i.Finish(final):
                return self._finish(state, place, final)
            case i.Settle() | i.Checkpoint():
                return state
        return state.put(place, node._replace(todo=(*node.todo, instruction)))

    def _result(self, state: State, place: int, tag: Tag, digest: str = "sum") -> State:
        node = state.nodes[place]
        held = state._replace(copies=state.copies | {(tag, node.seat)})
        return self._handle(held, place, e.ResultReady(tag, digest, str(node.state)))

    def _finish(self, state: State, place: int, final: str) -> State:
        """Have the final state and come to what the script does after its last step, or end before that."""
        node = state.nodes[place]
        step = node.state if not final else int(final)
        if node.state != step and dict(state.kept).get(node.seat.rank) == step:
            node = node._replace(state=step)
        if node.state != step and self.rules.final_only:
            if node.seat.rank not in state.gone:
                raise Broken(f"{node.seat} comes to the end and cannot have the final state")
            return state._replace(late=state.late | {node.seat.rank})
        if node.state != step:
            raise Broken(f"{node.seat} does what comes after the last step with the state of step {node.state}")
        return state.put(place, node._replace(done=True))

    def _next_call(self, state: State, place: int) -> State:
        """Make the register call that is next, or give the answer to the one that was made."""
        node = state.nodes[place]
        call, rest = node.todo[0], node.todo[1:]
        match call:
            case i.ReadGeneration():
                return state.answer(place, e.GenerationRead(dict(state.records).get(node.member.incarnation)))
            case i.ProposeGeneration(expected, new):
                records = dict(state.records)
                if records.get(new.incarnation) == expected:
                    if expected is not None:
                        self._check_successor(state, expected, new)
                    records[new.incarnation] = new
                    state = state._replace(records=tuple(sorted(records.items(), key=lambda item: item[0])))
                return state.answer(place, e.GenerationRead(records.get(new.incarnation)))
            case i.TryCommit(tag, decision):
                return self._create(state, place, tag, decision)
            case i.TryAbort(tag, generation):
                return self._create(state, place, tag, Abort(generation))
            case i.EndGeneration(incarnation, number, by):
                # ABORT is written for the step that would be decided next, unless one stands.
                tag = Tag(incarnation, number, 0, 0)
                decided = _decided_in(state, tag)
                if decided.abort is None:
                    state = _write_decision(state, replace(tag, step=decided.last + 1), Abort(by))
                return state.answer(place, e.GenerationEnded(number))
            case i.ReadDecision(tag):
                return state.answer(place, e.DecisionRead(tag, _decided_in(state, tag).answer(tag.step)))
            case e.GenerationRead() | e.DecisionRead() | e.GenerationEnded():
                return self._handle(state.put(place, node._replace(todo=rest)), place, call)
        raise Broken(f"{type(call).__name__} is no register call")

    def _check_successor(self, state: State, before: Generation, new: Generation) -> None:
        """Raise where a generation is no good successor of the one before it."""
        stay = {seat.rank for seat in new.members if seat in before.members}
        for link in new.broken:
            if not stay.issuperset(link):
                raise Broken(f"generation {new.number} goes around the link {link} of a process that has gone")
        # Where results differ and nothing else went wrong, the majority goes on, and of a tie nobody.
        *others, left = state.left
        voted = left < self.bounds.differences and others == list(self._all_left()[:DIFFERENCES])
        if voted and not new.closed and 2 * len(new.members) <= len(before.members):
            raise Broken(f"generation {new.number} goes on without half of the members, whose result was another")

    def _create(self, state: State, place: int, tag: Tag, decision: Decision) -> State:
        """Write a decision, once: a second one is answered with what stands."""
        decided = _decided_in(state, tag)
        stands = decided.answer(tag.step)
        if stands is not None:
            return state.answer(place, e.DecisionRead(tag, stands))
        decided.after(tag.step, decision)  # raises where a step would be left out
        if isinstance(decision, Commit):
            if state.given_up:
                raise Broken(f"{tag} is committed, and its incarnation was given up")
            for seat in decision.members:
                if (tag, seat) not in state.copies:
                    raise Broken(f"{tag} is committed, and {seat} holds no copy")
            for (incarnation, step, generation), other in state.decisions:
                if isinstance(other, Commit) and (incarnation, step) == (tag.incarnation, tag.step):
                    raise Broken(f"{tag} is committed, and was in generation {generation}")
        return _write_decision(state, tag, decision).answer(place, e.DecisionRead(tag, decision))


def _write_decision(state: State, tag: Tag, decision: Decision) -> State:
    decisions = {**dict(state.decisions), place_of(tag): decision}
    return state._replace(decisions=tuple(sorted(decisions.items(), key=lambda item: item[0])))


def _decided_in(state: State, tag: Tag) -> Decided:
    """Return what stands in the register of a generation, by all that was written into it."""
    decided, aborted = Decided(), None
    for (incarnation, step, generation), decision in state.decisions:  # by step
        if (incarnation, generation) == (tag.incarnation, tag.generation):
            if isinstance(decision, Commit):
                decided = decided.after(step, decision)
            else:
                aborted = decision
    return decided if aborted is None else decided.after(decided.last + 1, aborted)


def _all_there(state: State, node: Node) -> bool:
    """Tell whether all members have come to the exchange that a process is in."""
    return all((node.member.tag, other) in state.taking_part for other in node.members)


def who_waits(state: State) -> str:
    """Return who is not at an end, and about what, in words; "": nobody, but for those whom nobody can help.

    A process that is no member, or has no state, may wait for others to come: where no member with state lives, or none
    that it has a link to.
    """
    living = [node for node in state.nodes if node.alive and not node.ended]
    able = [node for node in living if node.member.step is not None]
    found = []
    for node in living:
        record = node.member.newest
        wants_state = node.member.step is None and record is not None
        helped = record is not None and any(
            peer.seat in record.members and state.links.connect(node.seat, peer.seat) for peer in able
        )
        if helped or not wants_state:
            found.append(f"{node.seat} is {node.member.phase.value}")
    return ", ".join(found)


__all__ = ["Move", "Moves", "who_waits"]

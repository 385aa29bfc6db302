"""A simulated process: carries out a member's instructions one by one, and can be stopped or killed between any two."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ringside.survive.protocol import Member
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Abort, Commit, Decision, MemberId, Tag
from ringside.survive.protocol.generation import Generation
from verification.survive.carrier import Carrier
from verification.survive.faults import Phase, Point
from verification.survive.sample_counting import Weights, add, digest
from verification.survive.simulated_exchange import Exchange, Part, ring_order

if TYPE_CHECKING:
    from verification.survive.simulated_world import World

POLL_S = 0.05
SUSPECT_S = 0.15
EXCHANGE_S = 0.25
FETCH_S = 0.3
ALONE_S = 1.0
Action = Callable[[], None]


class Process:
    """One process in its time as a rank.

    Args:
        world: Everything around it.
        seat: Who it is.

    Attributes:
        alive: Nobody killed it.
        ended: Its state machine is at an end.
        finished: It did the last step, and what its script does then.
        member: Its state machine.
        weights: Its state.
    """

    def __init__(self, world: World, seat: MemberId) -> None:
        self.world, self.seat = world, seat
        self.alive, self.ended, self.finished = True, False, False
        self.member = Member(seat, world.incarnation, world.settings)
        self.weights: Weights = world.model.weights_at(0)
        self._stopped_at: float | None = None
        self._todo: deque[Action] = deque()
        self._backlog: deque[Action] = deque()
        self._copies: dict[Tag, Weights] = {}
        self._carrier = Carrier(self)
        self._sums: list[int] = []
        self._fetched: tuple[Tag, list[int]] | None = None
        self._checked: set[Tag] = set()
        self._wrong = False
        self._published: Tag | None = None
        self._began_s = world.now
        world.after(world.between(0.0, POLL_S), lambda: self.post(self._poll))

    # ------------------------------------------------------------------------------------------ life

    def join(self) -> None:
        """Begin without state."""
        self.member = Member(self.seat, self.world.incarnation, self.world.settings)
        self.post(lambda: self.feed(e.Started(self.world.now)))

    def found(self, step: int, weights: Weights, founders: tuple[MemberId, ...]) -> None:
        """Begin with the state of a checkpoint."""
        self.member = Member(self.seat, self.world.incarnation, self.world.settings)
        self.weights = weights
        self.post(lambda: self.feed(e.Started(self.world.now, step, founders)))

    def stop(self) -> None:
        """SIGSTOP."""
        if self._stopped_at is None:
            self._stopped_at = self.world.now

    def wake(self) -> None:
        """SIGCONT: what it was about goes on, then what has come meanwhile."""
        self._stopped_at = None
        self._drain()
        while self._backlog and self._runs:
            self.post(self._backlog.popleft())

    def end(self) -> None:
        """Nothing more is to be done here."""
        self.ended = True
        self._todo.clear()

    @property
    def _runs(self) -> bool:
        return self.alive and not self.ended and self._stopped_at is None

    @property
    def silent_s(self) -> float:
        """For how long it has given no sign of life, seconds."""
        return 0.0 if self._stopped_at is None else self.world.now - self._stopped_at

    @property
    def holds_state(self) -> bool:
        """Whether it is a member with state."""
        return self.member.generation is not None and self.member.step is not None and not self.ended

    @property
    def members(self) -> tuple[MemberId, ...]:
        """Whom it takes part with."""
        return () if self.member.generation is None else self.member.generation.members

    def suspect(self, seat: MemberId) -> None:
        """Take another one for dead."""
        self.post(lambda: self.feed(e.PeerSuspected(seat)))

    def corrupt(self) -> None:
        """Let one number of what comes next be wrong."""
        self._wrong = True

    # ------------------------------------------------------------------------------------------ doing things in order

    def post(self, action: Action) -> None:
        """Do something now, or when it wakes up."""
        if not self.alive or self.ended:
            return
        if self._stopped_at is not None:
            self._backlog.append(action)
            return
        action()
        self._drain()

    def feed(self, event: e.Event) -> None:
        """Tell the state machine; what it wants done is put behind what is to be done already."""
        self._todo.extend(partial(self._carry_out, instruction) for instruction in self.member.handle(event))

    def _drain(self) -> None:
        while self._todo and self._runs:
            self._todo.popleft()()

    def _carry_out(self, instruction: i.Instruction) -> None:
        if isinstance(instruction, (i.Compute, i.RunExchange, i.FetchState)) and instruction.tag != self.member.tag:
            return
        _CARRY_OUT[type(instruction)](self, instruction)

    def do(self, action: Action) -> None:
        """Put something behind what is to be done."""
        self._todo.append(action)

    def reach(self, phase: Phase, step: int = -1, bucket: int = -1, round: int = -1) -> None:
        """Come to a point where a fault may strike."""
        self.world.reach(self, Point(phase, step, bucket, round))

    def _poll(self) -> None:
        """The clock ticks; look after the others."""
        self.feed(e.Tick(self.world.now))
        for seat in self.members:
            peer = self.world.processes[seat]
            if not peer.alive or peer.silent_s > SUSPECT_S:
                self.feed(e.PeerSuspected(seat))
        if self.member.step is None:
            self._look_for_state()
        if self.world.gone != self.member.gone:
            self.feed(e.RanksGone(tuple(sorted(self.world.gone))))
        self.world.after(POLL_S, lambda: self.post(self._poll))

    def _look_for_state(self) -> None:
        if self.member.newest is not None and self.world.nobody_has_state():
            self.feed(e.NobodyLeft())
        elif self.member.newest is None and self.world.now - self._began_s > ALONE_S:
            self._began_s = self.world.now
            self.world.gather(self, self.world.incarnation)

    # ------------------------------------------------------------------------------------------ registers

    def _read_generation(self, _: i.ReadGeneration) -> None:
        incarnation = self.member.incarnation
        self.world.ask(self, lambda: self.world.read_generation(incarnation), self.generation_stands)

    def _propose(self, wanted: i.ProposeGeneration) -> None:
        self.world.ask(self, lambda: self.world.swap_generation(wanted.expected, wanted.new), self.generation_stands)

    def generation_stands(self, record: Generation | None) -> None:
        """Take the answer of the store: unless it is of an earlier incarnation, the member hears of it."""
        if record is None or record.incarnation == self.member.incarnation:
            self.feed(e.GenerationRead(record))

    def _create(self, tag: Tag, decision: Decision) -> None:
        self.world.ask(self, lambda: self.world.create_decision(tag, decision), partial(self._decision_stands, tag))

    def _try_commit(self, wanted: i.TryCommit) -> None:
        self._todo.appendleft(lambda: self._create(wanted.tag, wanted.decision))
        self.reach(Phase.BEFORE_DECIDE, wanted.tag.step)

    def _try_abort(self, wanted: i.TryAbort) -> None:
        self._create(wanted.tag, Abort(wanted.generation))

    def _end_generation(self, wanted: i.EndGeneration) -> None:
        world, by = self.world, Abort(wanted.by)
        end = partial(world.end_generation, wanted.incarnation, wanted.number, by)
        world.ask(self, end, lambda number: self.feed(e.GenerationEnded(number)))

    def _read_decision(self, wanted: i.ReadDecision) -> None:
        tag = wanted.tag
        self.world.ask(self, lambda: self.world.read_decision(tag), partial(self._decision_stands, tag))

    def _decision_stands(self, tag: Tag, decision: Decision | None) -> None:
        self._todo.append(lambda: self.feed(e.DecisionRead(tag, decision)))
        if isinstance(decision, Commit) and tag == self.member.tag:
            self.reach(Phase.BEFORE_APPLY, tag.step)

    # ------------------------------------------------------------------------------------------ who takes part

    def _settle(self, wanted: i.Settle) -> None:
        self.world.ledger.settled(wanted.generation, self.seat)
        for tag in [tag for tag in self._copies if tag.generation != wanted.generation.number]:
            self._drop(tag)
        self._carrier.drop()

    def _drop(self, tag: Tag) -> None:
        if self._copies.pop(tag, None) is not None:
            self.world.ledger.dropped(tag, self.seat)

    def _ask_to_join(self, wanted: i.AskToJoin) -> None:
        self._todo.appendleft(lambda: self.world.tell_all(self, lambda p: p.feed(e.JoinRequested(wanted.seat))))
        if self.member.newest is not None:  # before that the job is only being founded
            self.reach(Phase.ASKING)

    def _offer(self, wanted: i.OfferState) -> None:
        offer = e.RankOffered(wanted.tag, self.seat, digest(self.weights))
        for seat in self.members:
            if seat.rank in wanted.joining:
                self.world.send(self, seat, lambda p: p.feed(e.StateOffered(offer)), by_store=True)

    def _fetch(self, wanted: i.FetchState) -> None:
        self._fetched = (wanted.tag, [])
        me, tag = self.seat, wanted.tag
        self.world.send(self, wanted.source, lambda p: p.serve(me, tag, 0))
        self.world.after(FETCH_S, lambda: self.post(lambda: self.feed(e.FetchFailed(tag))))

    def serve(self, to: MemberId, tag: Tag, half: int) -> None:
        """Send half of the state, as it is now, and the other half somewhat later."""
        middle = len(self.weights) // 2
        values = self.weights[middle:] if half else self.weights[:middle]
        self.world.send(self, to, lambda p: p.take_state(tag, values))
        if not half:
            self.reach(Phase.SERVING)
            self.world.after(self.world.between(0.005, 0.03), lambda: self.post(lambda: self.serve(to, tag, 1)))

    def take_state(self, tag: Tag, values: Weights) -> None:
        """A half of the state has come."""
        if self._fetched is None or self._fetched[0] != tag:
            return
        state = self._fetched[1]
        state.extend(values)
        if len(state) < len(self.weights):
            self.reach(Phase.FETCHING)
        elif self.member.step is None:
            self._state_is_here(tag, state)

    def _state_is_here(self, tag: Tag, state: list[int]) -> None:
        self._spoil(state)
        self.weights, self._fetched = tuple(state), None
        self.feed(e.StateFetched(tag, digest(state)))
        if self.member.step is not None:
            self.world.ledger.state(self.member.step, self.seat, self.weights)

    def _spoil(self, values: list[int]) -> None:
        if self._wrong:
            self._wrong, values[0] = False, values[0] + 1

    # ------------------------------------------------------------------------------------------ a step

    def _compute(self, wanted: i.Compute) -> None:
        if wanted.check_state:
            self._checked.add(wanted.tag)
        sums = self.world.model.gradient(wanted.tag.step, wanted.micro_batches)
        self.reach(Phase.COMPUTING, wanted.tag.step)
        self.world.after(self.world.between(0.02, 0.06), lambda: self.post(partial(self._computed, wanted.tag, sums)))

    def _computed(self, tag: Tag, sums: list[int]) -> None:
        self._sums = sums
        self.feed(e.WorkDone(tag))

    def _begin_exchange(self, wanted: i.RunExchange) -> None:
        record, tag, world = wanted.generation, wanted.tag, self.world
        order = ring_order(record.ranks, record.broken) or record.ranks
        algorithm = "ring" if record.broken else world.case.algorithm  # others have no order that avoids a link
        self._carrier.begin(Exchange(tag, order, self.seat.rank, world.model.cut(self._sums), algorithm))
        world.after(EXCHANGE_S, lambda: self.post(lambda: self._exchange_is_late(tag)))

    def take_part(self, part: Part) -> None:
        """A message of an exchange has come."""
        self._carrier.take(part)
        newest = self.member.newest
        if newest is not None and part.tag.generation > newest.number:
            self.feed(e.NewerHeardOf())

    def send_part(self, part: Part) -> None:
        """Send a message of an exchange."""
        to = next(seat for seat in self.members if seat.rank == part.dst)
        self.world.send(self, to, lambda p: p.take_part(part))

    def copy_result(self, tag: Tag, result: list[int]) -> None:
        """An exchange is done: copy what came of it."""
        if len(self.members) > 1:  # nobody could tell that the only copy there is is wrong
            self._spoil(result)
        self._copies[tag] = tuple(result)
        self.world.ledger.copied(tag, self.seat, digest(result))
        state = digest(self.weights) if tag in self._checked else ""
        self.feed(e.ResultReady(tag, digest(result), state))

    def _exchange_is_late(self, tag: Tag) -> None:
        missing = self._carrier.waits_for(tag)
        if missing and tag == self.member.tag:
            dead = [(src, self.seat.rank) for src in sorted(missing) if self.world.network.is_cut(src, self.seat.rank)]
            self.feed(self._failure(tag, dead))

    def _failure(self, tag: Tag, dead: list[tuple[int, int]]) -> e.AttemptFailed:
        """Tell whom or what to go around: links, as long as there is a ring without them."""
        broken = tuple((min(link), max(link)) for link in dead)
        record = self.member.generation
        if broken and record is not None and not ring_order(record.ranks, (*record.broken, *broken)):
            return e.AttemptFailed(tag, tuple(seat for seat in self.members if seat.rank == dead[0][0]))
        return e.AttemptFailed(tag, (), broken)

    def _publish(self, wanted: i.PublishAck) -> None:
        again = wanted.ack.tag == self._published
        self._published = wanted.ack.tag
        self._todo.appendleft(lambda: self.world.send(self, wanted.to, lambda p: p.feed(e.AckSeen(wanted.ack)), again))
        self.reach(Phase.BEFORE_DECIDE, wanted.ack.tag.step)

    def _apply(self, wanted: i.Apply) -> None:
        copy = self._copies.pop(wanted.tag, None)
        self.weights = self.weights if copy is None else add(self.weights, copy)
        self.world.ledger.applied(wanted.tag, self.seat, self.weights)

    def _discard(self, wanted: i.Discard) -> None:
        self._drop(wanted.tag)
        self._carrier.drop()

    def _checkpoint(self, wanted: i.Checkpoint) -> None:
        early = [copy for tag, copy in self._copies.items() if tag.step == wanted.step - 1]
        weights = add(self.weights, early[0]) if early else self.weights
        incarnation, step = self.member.incarnation, wanted.step
        self.world.ledger.saved(incarnation, step, weights)
        self.reach(Phase.CHECKPOINT, step - 1)
        written = partial(self.world.save, incarnation, step, weights)
        self.world.after(self.world.between(0.01, 0.1), lambda: self.post(written))

    # ------------------------------------------------------------------------------------------ ends

    def _open_incarnation(self, wanted: i.OpenIncarnation) -> None:
        self.world.gather(self, wanted.incarnation)

    def _leave(self, wanted: i.Leave) -> None:
        for tag in list(self._copies):
            self._drop(tag)
        self.world.again(self)

    def _keep(self, wanted: i.KeepState) -> None:
        self._todo.appendleft(partial(self._keep_now, wanted.tag))
        self.reach(Phase.LAST_APPLIED)

    def _keep_now(self, tag: Tag) -> None:
        if self.world.settings.rules.keep_final:
            self.world.kept[self.seat.rank] = self.weights
        self._todo.appendleft(lambda: self.feed(e.StateKept(tag, digest(self.weights))))
        self.reach(Phase.KEPT)

    def _finish(self, wanted: i.Finish) -> None:
        """Have the final state, and do what a script does after the last step: write it into a file."""
        if wanted.final and digest(self.weights) != wanted.final and self.world.settings.rules.final_only:
            kept = self.world.kept.get(self.seat.rank)
            if kept is None or digest(kept) != wanted.final:
                self.end()  # with a status that says so
                return
            self.weights = kept
        self._todo.append(self._save)
        self.reach(Phase.OVER)

    def _save(self) -> None:
        self._todo.append(partial(self.world.after, 0.02, lambda: self.post(self._saved)))
        self.reach(Phase.SAVING)

    def _saved(self) -> None:
        self.world.ledger.last_lines(self.seat, self.weights)
        self.finished = True
        self.end()

    def _halt(self, _: i.Halt) -> None:
        self.end()


_CARRY_OUT: dict[type, Callable[[Process, Any], None]] = {
    i.ReadGeneration: Process._read_generation,
    i.ProposeGeneration: Process._propose,
    i.Settle: Process._settle,
    i.AskToJoin: Process._ask_to_join,
    i.OfferState: Process._offer,
    i.FetchState: Process._fetch,
    i.Compute: Process._compute,
    i.RunExchange: Process._begin_exchange,
    i.PublishAck: Process._publish,
    i.TryCommit: Process._try_commit,
    i.TryAbort: Process._try_abort,
    i.EndGeneration: Process._end_generation,
    i.ReadDecision: Process._read_decision,
    i.Apply: Process._apply,
    i.Discard: Process._discard,
    i.Checkpoint: Process._checkpoint,
    i.OpenIncarnation: Process._open_incarnation,
    i.Leave: Process._leave,
    i.KeepState: Process._keep,
    i.Finish: Process._finish,
    i.Halt: Process._halt,
}

__all__ = ["Process"]

"""A simulated process: carries out a member's instructions one by one, and can be stopped or killed between any two."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ringside.survive.protocol import Member
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Abort, Commit, Decision, MemberId, Tag
from ringside.survive.protocol.generation import Generation
from verification.survive.faults import Phase, Point
from verification.survive.sample_counting import Weights, add, digest
from verification.survive.simulated_exchange import Exchange, Part, ring_order
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

    def __init__(self, world: World[Process], seat: MemberId) -> None:
        self.world, self.seat = world, seat
        self.alive, self.ended, self.finished = True, False, False
        self.member = Member(seat, world.incarnation, world.settings)
        self.weights: Weights = world.model.weights_at(0)
        self._stopped_at: float | None = None
        self._todo: deque[Action] = deque()
        self._backlog: deque[Action] = deque()
        self._copies: dict[Tag, Weights] = {}
        self._exchange_runner = ExchangeRunner(self)
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
        self._todo.extend(partial(self._execute, request) for request in self.member.handle(event))

    def _drain(self) -> None:
        while self._todo and self._runs:
            self._todo.popleft()()

    def _execute(self, request: i.Instruction) -> None:
        if isinstance(request, (i.Compute, i.RunExchange, i.FetchState)) and request.tag != self.member.tag:
            return
        _EXECUTE[type(request)](self, request)

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

    def _propose(self, request: i.ProposeGeneration) -> None:
        self.world.ask(self, lambda: self.world.swap_generation(request.expected, request.new), self.generation_stands)

    def generation_stands(self, record: Generation | None) -> None:
        """Take the answer of the store: unless it is of an earlier incarnation, the member hears of it."""
        if record is None or record.incarnation == self.member.incarnation:
            self.feed(e.GenerationRead(record))

    def _create(self, tag: Tag, decision: Decision) -> None:
        self.world.ask(self, lambda: self.world.create_decision(tag, decision), partial(self._decision_stands, tag))

    def _try_commit(self, request: i.TryCommit) -> None:
        self._todo.appendleft(lambda: self._create(request.tag, request.decision))
        self.reach(Phase.BEFORE_DECIDE, request.tag.step)

    def _try_abort(self, request: i.TryAbort) -> None:
        self._create(request.tag, Abort(request.generation))

    def _end_generation(self, request: i.EndGeneration) -> None:
        world, by = self.world, Abort(request.by)
        end = partial(world.end_generation, request.incarnation, request.number, by)
        world.ask(self, end, lambda number: self.feed(e.GenerationEnded(number)))

    def _read_decision(self, request: i.ReadDecision) -> None:
        tag = request.tag
        self.world.ask(self, lambda: self.world.read_decision(tag), partial(self._decision_stands, tag))

    def _decision_stands(self, tag: Tag, decision: Decision | None) -> None:
        self._todo.append(lambda: self.feed(e.DecisionRead(tag, decision)))
        if isinstance(decision, Commit) and tag == self.member.tag:
            self.reach(Phase.BEFORE_APPLY, tag.step)

    # ------------------------------------------------------------------------------------------ who takes part

    def _settle(self, request: i.Settle) -> None:
        self.world.invariants.settled(request.generation, self.seat)
        for tag in [tag for tag in self._copies if tag.generation != request.generation.number]:
            self._drop(tag)
        self._exchange_runner.drop()

    def _drop(self, tag: Tag) -> None:
        if self._copies.pop(tag, None) is not None:
            self.world.invariants.dropped(tag, self.seat)

    def _ask_to_join(self, request: i.AskToJoin) -> None:
        self._todo.appendleft(lambda: self.world.tell_all(self, lambda p: p.feed(e.JoinRequested(request.seat))))
        if self.member.newest is not None:  # before that the job is only being founded
            self.reach(Phase.ASKING)

    def _offer(self, request: i.OfferState) -> None:
        offer = e.RankOffered(request.tag, self.seat, digest(self.weights))
        for seat in self.members:
            if seat.rank in request.joining:
                self.world.send(self, seat, lambda p: p.feed(e.StateOffered(offer)), by_store=True)

    def _fetch_state(self, request: i.FetchState) -> None:
        self._fetched = (request.tag, [])
        me, tag = self.seat, request.tag
        self.world.send(self, request.source, lambda p: p.serve(me, tag, 0))
        self.world.after(FETCH_S, lambda: self.post(lambda: self.feed(e.FetchFailed(tag))))

    def serve(self, to: MemberId, tag: Tag, half: int) -> None:
        """Send half of the state, as it is now, and the other half somewhat later."""
        middle = len(self.weights) // 2
        values = self.weights[middle:] if half else self.weights[:middle]
        self.world.send(self, to, lambda p: p.receive_state(tag, values))
        if not half:
            self.reach(Phase.SERVING)
            self.world.after(self.world.between(0.005, 0.03), lambda: self.post(lambda: self.serve(to, tag, 1)))

    def receive_state(self, tag: Tag, values: Weights) -> None:
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
            self.world.invariants.state(self.member.step, self.seat, self.weights)

    def _spoil(self, values: list[int]) -> None:
        if self._wrong:
            self._wrong, values[0] = False, values[0] + 1

    # ------------------------------------------------------------------------------------------ a step

    def _compute(self, request: i.Compute) -> None:
        if request.check_state:
            self._checked.add(request.tag)
        sums = self.world.model.gradient(request.tag.step, request.micro_batches)
        self.reach(Phase.COMPUTING, request.tag.step)
        self.world.after(self.world.between(0.02, 0.06), lambda: self.post(partial(self._computed, request.tag, sums)))

    def _computed(self, tag: Tag, sums: list[int]) -> None:
        self._sums = sums
        self.feed(e.WorkDone(tag))

    def _begin_exchange(self, request: i.RunExchange) -> None:
        record, tag, world = request.generation, request.tag, self.world
        order = ring_order(record.ranks, record.broken) or record.ranks
        algorithm = "ring" if record.broken else world.case.algorithm  # others have no order that avoids a link
        self._exchange_runner.begin(Exchange(tag, order, self.seat.rank, world.model.cut(self._sums), algorithm))
        world.after(EXCHANGE_S, lambda: self.post(lambda: self._exchange_is_late(tag)))

    def receive_part(self, part: Part) -> None:
        """A message of an exchange has come."""
        self._exchange_runner.receive(part)
        newest = self.member.newest
        if newest is not None and part.tag.generation > newest.number:
            self.feed(e.NewerHeardOf())

    def send_part(self, part: Part) -> None:
        """Send a message of an exchange."""
        to = next(seat for seat in self.members if seat.rank == part.dst)
        self.world.send(self, to, lambda p: p.receive_part(part))

    def copy_result(self, tag: Tag, result: list[int]) -> None:
        """An exchange is done: copy what came of it."""
        if len(self.members) > 1:  # nobody could tell that the only copy there is is wrong
            self._spoil(result)
        self._copies[tag] = tuple(result)
        self.world.invariants.copied(tag, self.seat, digest(result))
        state = digest(self.weights) if tag in self._checked else ""
        self.feed(e.ResultReady(tag, digest(result), state))

    def _exchange_is_late(self, tag: Tag) -> None:
        missing = self._exchange_runner.waits_for(tag)
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

    def _publish(self, request: i.PublishAck) -> None:
        again = request.ack.tag == self._published
        self._published = request.ack.tag
        self._todo.appendleft(
            lambda: self.world.send(self, request.to, lambda p: p.feed(e.AckSeen(request.ack)), again)
        )
        self.reach(Phase.BEFORE_DECIDE, request.ack.tag.step)

    def _apply(self, request: i.Apply) -> None:
        copy = self._copies.pop(request.tag, None)
        self.weights = self.weights if copy is None else add(self.weights, copy)
        self.world.invariants.applied(request.tag, self.seat, self.weights)

    def _discard(self, request: i.Discard) -> None:
        self._drop(request.tag)
        self._exchange_runner.drop()

    def _checkpoint(self, request: i.Checkpoint) -> None:
        early = [copy for tag, copy in self._copies.items() if tag.step == request.step - 1]
        weights = add(self.weights, early[0]) if early else self.weights
        incarnation, step = self.member.incarnation, request.step
        self.world.invariants.saved(incarnation, step, weights)
        self.reach(Phase.CHECKPOINT, step - 1)
        written = partial(self.world.save, incarnation, step, weights)
        self.world.after(self.world.between(0.01, 0.1), lambda: self.post(written))

    # ------------------------------------------------------------------------------------------ ends

    def _open_incarnation(self, request: i.OpenIncarnation) -> None:
        self.world.gather(self, request.incarnation)

    def _leave(self, request: i.Leave) -> None:
        for tag in list(self._copies):
            self._drop(tag)
        self.world.again(self)

    def _keep(self, request: i.KeepState) -> None:
        self._todo.appendleft(partial(self._keep_now, request.tag))
        self.reach(Phase.LAST_APPLIED)

    def _keep_now(self, tag: Tag) -> None:
        if self.world.settings.rules.keep_final:
            self.world.kept[self.seat.rank] = self.weights
        self._todo.appendleft(lambda: self.feed(e.StateKept(tag, digest(self.weights))))
        self.reach(Phase.KEPT)

    def _finish(self, request: i.Finish) -> None:
        """Have the final state, and do what a script does after the last step: write it into a file."""
        if request.final and digest(self.weights) != request.final and self.world.settings.rules.final_only:
            kept = self.world.kept.get(self.seat.rank)
            if kept is None or digest(kept) != request.final:
                self.end()  # with a status that says so
                return
            self.weights = kept
        self._todo.append(self._save)
        self.reach(Phase.OVER)

    def _save(self) -> None:
        self._todo.append(partial(self.world.after, 0.02, lambda: self.post(self._saved)))
        self.reach(Phase.SAVING)

    def _saved(self) -> None:
        self.world.invariants.last_lines(self.seat, self.weights)
        self.finished = True
        self.end()

    def _halt(self, _: i.Halt) -> None:
        self.end()


class ExchangeRunner:
    """Runs one exchange after the other.

    Args:
        process: Whose; it is told of the result by `copy_result`.

    Attributes:
        now: The exchange under way; None: there is none.
    """

    def __init__(self, process: Process) -> None:
        self.now: Exchange | None = None
        self._process = process
        self._early: list[Part] = []

    def begin(self, exchange: Exchange) -> None:
        """Begin an exchange; parts of it may have come already."""
        self.now, early = exchange, self._early
        self._early = []
        for bucket in range(len(exchange.buckets)):
            self._send_round(exchange, bucket)
        for part in early:
            self.receive(part)
        self._advance()

    def drop(self) -> None:
        """Leave the exchange under way."""
        self.now = None

    def receive(self, part: Part) -> None:
        """Store a part into the exchange that it names; without tags, into any."""
        now, world = self.now, self._process.world
        if now is not None and (part.tag == now.tag or not world.outside.tagged_data):
            world.invariants.stored(now.tag, part.tag)
            now.receive(part)
            self._advance()
        elif now is None or part.tag > now.tag:
            self._early.append(part)

    def waits_for(self, tag: Tag) -> set[int]:
        """Return the ranks that an attempt waits for, if it is under way."""
        now = self.now
        if now is None or now.tag != tag:
            return set()
        return {src for bucket in range(len(now.rounds_done)) if (src := now.missing(bucket)) is not None}

    def _advance(self) -> None:
        """Advance every bucket as far as what has come allows."""
        now, do = self.now, self._process.do
        if now is None:
            return
        for bucket, k in enumerate(now.rounds_done):
            if now.advance(bucket):
                do(partial(self._process.reach, Phase.AFTER_RECEIVE, now.tag.step, bucket, k))
                self._send_round(now, bucket)
                do(self._advance)
        if now.done:
            do(partial(self._end, now))

    def _send_round(self, now: Exchange, bucket: int) -> None:
        do, reach, send = self._process.do, self._process.reach, self._process.send_part
        where = (now.tag.step, bucket, now.rounds_done[bucket])
        for first, second in now.sends(bucket):
            do(partial(reach, Phase.BEFORE_SEND, *where))
            do(partial(send, first))
            do(partial(reach, Phase.MID_CHUNK, *where))
            do(partial(send, second))
            do(partial(reach, Phase.AFTER_SEND, *where))

    def _end(self, now: Exchange) -> None:
        if now is self.now:
            self.now = None
            self._process.copy_result(now.tag, list(now.result))


_EXECUTE: dict[type, Callable[[Process, Any], None]] = {
    i.ReadGeneration: Process._read_generation,
    i.ProposeGeneration: Process._propose,
    i.Settle: Process._settle,
    i.AskToJoin: Process._ask_to_join,
    i.OfferState: Process._offer,
    i.FetchState: Process._fetch_state,
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

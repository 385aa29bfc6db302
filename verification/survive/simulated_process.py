"""A simulated process: carries out a member's instructions one by one, and can be stopped or killed between any two."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from ringside.survive.protocol import Member
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Abort, Commit, Decision, MemberId, Tag
from ringside.survive.protocol.generation import Generation
from verification.survive.broken_rules import machine
from verification.survive.faults import Phase, Point
from verification.survive.sample_counting import Weights, apply_gradient, digest_of
from verification.survive.simulated_exchange import Exchange, Part, ring_order
from verification.survive.simulated_world import World

# Seconds of the simulated clock.
POLL_S = 0.05  # between two looks at the others
SUSPECT_S = 0.15  # of silence, after which a member is suspected
EXCHANGE_S = 0.25  # until an exchange that has not ended is late
FETCH_S = 0.3  # until a fetch that has not ended has failed
ALONE_S = 1.0  # without a generation, until a process founds one
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
        self.member = machine(world.rules, Member)(seat, world.incarnation, world.settings)
        self.weights: Weights = world.model.weights_at(0)
        self._stopped_at: float | None = None  # seconds of the world's clock
        # What is to be done now, in order; and what came while the process was stopped.
        self._todo: deque[Action] = deque()
        self._backlog: deque[Action] = deque()
        # Private copies of results by attempt; the state is changed only by `Apply`.
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
        self.member = machine(self.world.rules, Member)(self.seat, self.world.incarnation, self.world.settings)
        self.post(lambda: self.feed(e.Started(self.world.now)))

    def found(self, step: int, weights: Weights, founders: tuple[MemberId, ...]) -> None:
        """Begin with the state of a checkpoint."""
        self.member = machine(self.world.rules, Member)(self.seat, self.world.incarnation, self.world.settings)
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

    def do(self, action: Action) -> None:
        """Put something behind what is to be done."""
        self._todo.append(action)

    def reach(self, phase: Phase, step: int = -1, bucket: int = -1, round: int = -1) -> None:
        """Come to a point where a fault may strike."""
        self.world.reach(self, Point(phase, step, bucket, round))

    def _poll(self) -> None:
        """The clock ticks; look after the others."""
        world, member = self.world, self.member
        self.feed(e.Tick(world.now))
        for seat in self.members:
            peer = world.processes[seat]
            if not peer.alive or peer.silent_s > SUSPECT_S:
                self.feed(e.PeerSuspected(seat))
        if member.step is None:
            if member.newest is not None and world.nobody_has_state():
                self.feed(e.NobodyLeft())
            elif member.newest is None and world.now - self._began_s > ALONE_S:
                # No generation, and none comes: it was started again before there was one, and founds the first.
                self._began_s = world.now
                world.gather(self, world.incarnation)
        if world.gone != self.member.gone:
            self.feed(e.RanksGone(tuple(sorted(world.gone))))
        world.after(POLL_S, lambda: self.post(self._poll))

    # ------------------------------------------------------------------------------------------ instructions

    def _execute(self, request: i.Instruction) -> None:
        """Carry out an instruction as a driver would.

        A fault may strike where a point is reached, and a stopped process goes on there when it wakes. So what follows
        a point is put in front of everything that is to be done, before the point is reached.
        """
        world, me = self.world, self.seat
        if isinstance(request, (i.Compute, i.RunExchange, i.FetchState)) and request.tag != self.member.tag:
            return  # of an attempt that was given up meanwhile
        match request:
            # Registers: what is asked for is done whatever becomes of this process.
            case i.ReadGeneration():
                incarnation = self.member.incarnation
                world.ask(self, lambda: world.read_generation(incarnation), self.generation_stands)
            case i.ProposeGeneration(expected, new):
                world.ask(self, lambda: world.swap_generation(expected, new), self.generation_stands)
            case i.TryCommit(tag, decision):
                self._todo.appendleft(lambda: self._create(tag, decision))
                self.reach(Phase.BEFORE_DECIDE, tag.step)
            case i.TryAbort(tag, by):
                self._create(tag, Abort(by))
            case i.EndGeneration(incarnation, number, by):
                end = partial(world.end_generation, incarnation, number, Abort(by))
                world.ask(self, end, lambda ended: self.feed(e.GenerationEnded(ended)))
            case i.ReadDecision(tag):
                world.ask(self, lambda: world.read_decision(tag), partial(self._decision_stands, tag))

            # Who takes part
            case i.Settle(record):
                world.invariants.settled(record, me)
                for held in list(self._copies):
                    if held.generation != record.number:
                        self._drop(held)
                self._exchange_runner.drop()
            case i.AskToJoin(seat):
                self._todo.appendleft(lambda: world.tell_all(self, lambda p: p.feed(e.JoinRequested(seat))))
                if self.member.newest is not None:  # before that the job is only being founded
                    self.reach(Phase.ASKING)
            case i.OfferState(tag, joining):
                offer = e.StateOffered(e.RankOffered(tag, me, digest_of(self.weights)))
                for to in self.members:
                    if to.rank in joining:
                        world.send(self, to, lambda p: p.feed(offer), by_store=True)
            case i.FetchState(source, tag):
                self._fetched = (tag, [])
                world.send(self, source, lambda p: p.serve(me, tag, 0))
                world.after(FETCH_S, lambda: self.post(lambda: self.feed(e.FetchFailed(tag))))

            # A step
            case i.Compute(tag, micro_batches, check_state):
                if check_state:
                    self._checked.add(tag)
                sums = world.model.gradient(tag.step, micro_batches)
                self.reach(Phase.COMPUTING, tag.step)
                world.after(world.between(0.02, 0.06), lambda: self.post(partial(self._computed, tag, sums)))
            case i.RunExchange(tag, record):
                order = ring_order(record.ranks, record.broken) or record.ranks
                algorithm = "ring" if record.broken else world.case.algorithm  # others have no order that avoids a link
                buckets = world.model.cut(self._sums)
                self._exchange_runner.begin(Exchange(tag, order, me.rank, buckets, algorithm))
                world.after(EXCHANGE_S, lambda: self.post(lambda: self._exchange_is_late(tag)))
            case i.PublishAck(ack, to):
                by_store = ack.tag == self._published  # it is repeated: the link may be broken
                self._published = ack.tag
                self._todo.appendleft(lambda: world.send(self, to, lambda p: p.feed(e.AckSeen(ack)), by_store))
                self.reach(Phase.BEFORE_DECIDE, ack.tag.step)
            case i.Apply(tag):
                copy = self._copies.pop(tag, None)
                self.weights = self.weights if copy is None else apply_gradient(self.weights, copy)
                world.invariants.applied(tag, me, self.weights)
            case i.Discard(tag):
                self._drop(tag)
                self._exchange_runner.drop()
            case i.Checkpoint(step):
                # A copy of the last step that is still held is in no weights yet.
                early = [copy for tag, copy in self._copies.items() if tag.step == step - 1]
                weights = apply_gradient(self.weights, early[0]) if early else self.weights
                world.invariants.saved(self.member.incarnation, step, weights)
                written = partial(world.save, self.member.incarnation, step, weights)
                self.reach(Phase.CHECKPOINT, step - 1)
                world.after(world.between(0.01, 0.1), lambda: self.post(written))

            # Ends
            case i.OpenIncarnation(incarnation):
                world.gather(self, incarnation)
            case i.Leave():
                for held in list(self._copies):
                    self._drop(held)
                world.again(self)
            case i.KeepState(tag):
                self._todo.appendleft(partial(self._keep, tag))
                self.reach(Phase.LAST_APPLIED)
            case i.Finish(final):
                # With the final state it does what a script does after the last step: write it into a file.
                if final and digest_of(self.weights) != final and world.rules.final_only:
                    kept = world.kept.get(me.rank)
                    if kept is None or digest_of(kept) != final:
                        self.end()  # with a status that says so
                        return
                    self.weights = kept
                self._todo.append(self._save)
                self.reach(Phase.OVER)
            case i.Halt():
                self.end()

    def _create(self, tag: Tag, decision: Decision) -> None:
        self.world.ask(self, lambda: self.world.create_decision(tag, decision), partial(self._decision_stands, tag))

    def generation_stands(self, record: Generation | None) -> None:
        """Take the answer of the store: unless it is of an earlier incarnation, the member hears of it."""
        if record is None or record.incarnation == self.member.incarnation:
            self.feed(e.GenerationRead(record))

    def _decision_stands(self, tag: Tag, decision: Decision | None) -> None:
        self._todo.append(lambda: self.feed(e.DecisionRead(tag, decision)))
        if isinstance(decision, Commit) and tag == self.member.tag:
            self.reach(Phase.BEFORE_APPLY, tag.step)

    def _drop(self, tag: Tag) -> None:
        if self._copies.pop(tag, None) is not None:
            self.world.invariants.dropped(tag, self.seat)

    def _computed(self, tag: Tag, sums: list[int]) -> None:
        self._sums = sums
        self.feed(e.WorkDone(tag))

    def _keep(self, tag: Tag) -> None:
        if self.world.rules.keep_final:
            self.world.kept[self.seat.rank] = self.weights
        self._todo.appendleft(lambda: self.feed(e.StateKept(tag, digest_of(self.weights))))
        self.reach(Phase.KEPT)

    def _save(self) -> None:
        self._todo.append(partial(self.world.after, 0.02, lambda: self.post(self._saved)))
        self.reach(Phase.SAVING)

    def _saved(self) -> None:
        self.world.invariants.last_lines(self.seat, self.weights)
        self.finished = True
        self.end()

    # ------------------------------------------------------------------------------------------ state of another

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
        state, wanted = self._fetched[1], self.member.step is None
        state.extend(values)
        if len(state) < len(self.weights):
            self.reach(Phase.FETCHING)
        elif wanted:
            self._corrupt_if_due(state)
            self.weights, self._fetched = tuple(state), None
            self.feed(e.StateFetched(tag, digest_of(state)))
            # Only where its digest was as offered has the member taken it.
            if self.member.step is not None:
                self.world.invariants.state(self.member.step, self.seat, self.weights)

    def _corrupt_if_due(self, values: list[int]) -> None:
        if self._wrong:
            self._wrong = False
            values[0] += 1

    # ------------------------------------------------------------------------------------------ the exchange

    def receive_part(self, part: Part) -> None:
        """A message of an exchange has come."""
        self._exchange_runner.receive(part)
        newest = self.member.newest
        if newest is not None and part.tag.generation > newest.number:
            self.do(partial(self._execute, i.ReadGeneration()))

    def send_part(self, part: Part) -> None:
        """Send a message of an exchange."""
        to = next(seat for seat in self.members if seat.rank == part.dst)
        self.world.send(self, to, lambda p: p.receive_part(part))

    def copy_result(self, tag: Tag, result: list[int]) -> None:
        """An exchange is done: copy what came of it."""
        if len(self.members) > 1:  # nobody could tell that the only copy there is is wrong
            self._corrupt_if_due(result)
        self._copies[tag] = tuple(result)
        self.world.invariants.copied(tag, self.seat, digest_of(result))
        state = digest_of(self.weights) if tag in self._checked else ""
        self.feed(e.ResultReady(tag, digest_of(result), state))

    def _exchange_is_late(self, tag: Tag) -> None:
        """Tell the member whom or what to go around: links, as long as there is a ring without them."""
        missing = self._exchange_runner.waits_for(tag)
        if not missing or tag != self.member.tag:
            return
        dead = [(src, self.seat.rank) for src in sorted(missing) if self.world.network.is_cut(src, self.seat.rank)]
        broken = tuple((min(link), max(link)) for link in dead)
        record = self.member.generation
        if broken and record is not None and not ring_order(record.ranks, (*record.broken, *broken)):
            self.feed(e.AttemptFailed(tag, tuple(seat for seat in self.members if seat.rank == dead[0][0])))
        else:
            self.feed(e.AttemptFailed(tag, (), broken))


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


__all__ = ["Process"]

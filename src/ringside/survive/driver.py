"""Executes the instructions of a member's state machine: registers, memory, processes, PyTorch.

The driver is the machine's other half: it turns what happens (mail, deaths, answers of registers, results) into events
for `Member.handle`, and does what that returns, in order. One thread does all of it; `WorkerListener` reads the store
beside it. While an instruction waits (an exchange, a state on its way), `_attend` goes on handling events, and ends
the wait with `Superseded` once the member's attempt has moved on.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from ringside.errors import FinalStateError, RingsideError, StoreGoneError
from ringside.survive.all_reduce.between_hosts import NetExchange
from ringside.survive.all_reduce.one_host import HostExchange, HostLayout, own_slots
from ringside.survive.attempt import AnyExchange, Attempt
from ringside.survive.audit import SampleDigests
from ringside.survive.cluster.known_workers import KnownWorkers
from ringside.survive.cluster.links import Reachability
from ringside.survive.cluster.peers import PeerMark, PeerWait, Superseded, own_place
from ringside.survive.cluster.rendezvous import Joining, WorkerListener
from ringside.survive.job import Step, SurviveJob
from ringside.survive.protocol import Member, MemberPhase
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Abort, Decisions, MemberId, Tag, encode
from ringside.survive.protocol.generation import decode_generation, generation_key
from ringside.survive.state.transfer import StateTransfer, choose_giver
from ringside.text import name_ranks

_log = logging.getLogger(__name__)
_PAUSE_S = 2e-4  # between looks at shared memory, while others compute or vote
_LOOK_S = 2e-3  # between looks at a register
_ASK_AGAIN_S = 1.0
_LAST_WRITE_S = 120.0  # how long a checkpoint that is being written is waited for at the end
_LOG_AGAIN_S = 30.0
_FOUNDING_S = 60.0  # how long the first ranks wait for each other
_WHERE_S = 5.0  # how long a rank that comes too late waits to read where the final state lies


class Driver:
    """One worker's part in a job.

    It has many methods because the protocol has many instructions: 21 of them are one instruction each (`_HANDLERS`),
    and all share the job, its store and the attempt that is under way.

    Args:
        job: What is trained.

    Attributes:
        member: The state machine.
        reason: Why the job ended before its last step; "": it did not, or this rank wanted that.
        is_over: Whether the job has come to its end, for all ranks.
        spent: Seconds by kind of instruction, and for digests (which `Exchange` contains).
        digests: Of the results that were applied here.
    """

    def __init__(self, job: SurviveJob) -> None:
        self.job = job
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._reached = job.failpoints.reached
        self.reason = ""
        self.digests = SampleDigests()
        self._initial = job.state.copied()
        self._todo: deque[i.Instruction] = deque()
        self._mark = PeerMark()
        self._attempt = Attempt(job, self.spent)
        self._transfer = StateTransfer(job)
        self._exchange: AnyExchange | None = None
        self._peer_wait: PeerWait | None = None
        self._waits_in: tuple[MemberPhase, Tag | None] | None = None
        self._last_done: dict[Any, float] = {}
        self._ticked = self._applied_at = time.monotonic()
        self._step: Step | None = None
        self._life = 0
        self._founders: tuple[MemberId, ...] = ()
        self._ends = self.is_over = False
        self._registers = job.rendezvous.registers
        self._decisions = Decisions(self._registers)
        self._begin(job.rendezvous.incarnation(), fresh=True)

    # ------------------------------------------------------------------------------------------ for the training loop

    def next_step(self) -> Step | None:
        """Train until the next step is committed and applied; return it, or None after the last.

        Raises:
            RingsideError: Training cannot go on; the state was saved, if there is a place for it.
        """
        self._step = None
        try:
            while self._step is None and (self._todo or self.member.phase is not MemberPhase.ENDED):
                try:
                    any_event = self._poll()
                    if self._todo:
                        self._execute(self._todo.popleft())
                    elif not any_event:
                        slow = self.member.phase in (MemberPhase.OUTSIDE, MemberPhase.CLOSING)
                        time.sleep(_LOOK_S if slow else _PAUSE_S)
                        self._tick()
                except StoreGoneError:
                    if self.member.phase not in (MemberPhase.KEEPING, MemberPhase.CLOSING):
                        raise
                    # After the last step nothing is lost by that: end with the final state, where this rank has it.
                    _log.warning(
                        "the store is lost after the last step: rank %d ends with the state of that", self.job.rank
                    )
                    self._todo.clear()
                    self._todo.extend(self.member.handle(e.StoreLost()))
        except RingsideError:
            self._save_state()
            raise
        return self._step

    def end_job(self) -> None:
        """End the job for all ranks with the state that this one has; return when all have it.

        Where the others have gone on without this rank, it ends with the state that they have.

        Raises:
            RingsideError: As `next_step`.
        """
        self._ends = True
        while self.member.phase is not MemberPhase.ENDED or self._todo:
            self.handle(e.EndWanted())
            self.next_step()

    def has_elders(self) -> bool:
        """Tell whether this process has joined others, and one that began the job takes part and lives."""
        elders = [seat for seat in self.member.members if seat in self._founders and seat != self.member.seat]
        return self.joined and any(not self._known.peer(seat).ended() for seat in elders)

    @property
    def joined(self) -> bool:
        """Whether this process takes part without having been there at the beginning."""
        return self.member.seat not in self._founders

    def close(self) -> None:
        """Close memory, peers and threads; wait for a checkpoint that is being written."""
        self._store_threads.close()
        if self.job.checkpoints is not None:
            self.job.checkpoints.finish(_LAST_WRITE_S)
        self._close_generation()
        self._mark.close()

    # ------------------------------------------------------------------------------------------ beginning

    def _begin(self, incarnation: int, fresh: bool) -> None:
        """Claim a seat in an incarnation and start its state machine; without fresh state as one that joins."""
        job, rendezvous = self.job, self.job.rendezvous
        self._life += 1
        place = own_place(self._life, job.state.step if fresh else 0)
        self._known = KnownWorkers(rendezvous, incarnation, lambda seat: self._listener.silent_s(seat))
        seat = self._known.claim(job.rank, place)
        job.failpoints.epoch, job.failpoints.incarnation = seat.epoch, incarnation
        self._transfer.unreached.clear()

        # Threads of this seat: one reads the store, others knock at members and answer those who knock.
        self._reachability = Reachability(seat, incarnation, rendezvous, job.open_transport)
        self._listener = WorkerListener(job.listening, incarnation, seat, self._reachability.answer)
        self._store_threads = threads = contextlib.ExitStack()
        threads.callback(self._reachability.close)
        threads.callback(self._listener.close)

        self.member = Member(seat, incarnation, job.settings)
        if fresh:  # a process that was left out comes back to the same founders
            self._founders = self._wait_for_founders(incarnation)
        step = job.state.step if seat in self._founders else None
        self.handle(e.Started(time.monotonic(), step, self._founders if step is not None else ()))

    def _wait_for_founders(self, incarnation: int) -> tuple[MemberId, ...]:
        """Return the processes that begin an incarnation together: those whose state is the newest of all."""
        peer = self._known.peer
        present = self.job.rendezvous.founders(incarnation, _FOUNDING_S, lambda seat: not peer(seat).ended())
        steps = {seat: peer(seat).place.step for seat in present}
        newest = max(steps.values(), default=0)
        return tuple(seat for seat in present if steps[seat] == newest)  # the others fetch the state from these

    def _begin_again(self, incarnation: int, tree: dict[str, Any] | None) -> None:
        """Leave this seat and claim another; with a state to begin with, or none."""
        self._store_threads.close()
        self._close_generation()
        if tree is not None:
            self.job.state.load(tree)
        self._begin(incarnation, fresh=tree is not None)

    def _close_generation(self) -> None:
        """Close what belongs to one generation: its memory, its connections, its processes."""
        self._transfer.withdraw()
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._peer_wait = None
        self._known.close()

    # ------------------------------------------------------------------------------------------ events

    def handle(self, event: e.Event) -> None:
        """Hand the member an event; what follows of it is done in turn."""
        self._tick()
        self._todo.extend(self.member.handle(event))

    def _tick(self) -> None:
        """Let the member know the time, if it is stale: before any other event."""
        now = time.monotonic()
        if now - self._ticked > self.job.settings.retry_s / 2:
            self._ticked = now
            self._todo.extend(self.member.handle(e.Tick(now)))

    def _poll(self) -> bool:
        """Hand the member what has happened since the last time; return whether anything has."""
        member, record, peer_wait = self.member, self.member.generation, self._peer_wait
        if record is not None and len(record.members) == 1 and self._is_due(_ASK_AGAIN_S, "alone"):
            self._known.refuse_to_be_left_alone(record, self.job.rank)
        events: list[e.Event] = list(self._listener.events())

        # Acknowledgements: in shared memory or registers, where only the leader counts them.
        own = member.own
        if self._exchange is not None and own is not None and member.is_leader:
            acks = self._exchange.acknowledgements(own.tag, bool(own.state))
            events += [e.AckSeen(ack) for ack in acks if member.acks.get(ack.seat) != ack]

        # Deaths: of everybody who held state, for one that has none; of members, for a member.
        if member.step is None and self._is_nobody_left():
            events.append(e.NobodyLeft())
        elif peer_wait is not None:
            suspects = member.change.suspects
            events += [e.PeerSuspected(seat) for seat in peer_wait.dead() if seat not in suspects]

        events += self._ranks_that_do_not_come()
        for event in events:
            self.handle(event)
        return bool(events)

    def _attend(self, suspects: Sequence[MemberId]) -> None:
        """Handle events in the middle of a wait; raise `Superseded` once the wait leads nowhere."""
        waits_in, known = self._waits_in, self.member.change.suspects
        for event in (*self._listener.events(), *(e.PeerSuspected(seat) for seat in suspects if seat not in known)):
            self.handle(event)
        self._tick()
        # Instructions are executed as long as they concern the attempt that waits: then its wait goes on.
        while self._todo and self._attempt_now == waits_in:
            self._execute(self._todo.popleft())
        if self._attempt_now != waits_in:
            raise Superseded

    @property
    def _attempt_now(self) -> tuple[MemberPhase, Tag | None]:
        return self.member.phase, self.member.tag

    def _is_nobody_left(self) -> bool:
        record = self.member.newest
        if record is None or not self._is_due(_ASK_AGAIN_S / 4, "nobody left"):
            return False
        return not record.closed and all(self._known.peer(seat).ended() for seat in record.holders)

    def _ranks_that_do_not_come(self) -> list[e.Event]:
        """Find out at the end which of the ranks that are not there do not come any more: the leader asks."""
        member = self.member
        asks = member.phase is MemberPhase.CLOSING and member.is_leader
        missing = member.absent_ranks if asks else ()
        if not missing or not self._is_due(_ASK_AGAIN_S / 4, "missing"):
            return []
        gone = tuple(filter(self._known.is_gone, missing))
        if self._is_due(_LOG_AGAIN_S, "waits"):
            _log.info("the last step is done: %s is waited for", name_ranks(missing))
        return [] if member.gone == frozenset(gone) else [e.RanksGone(gone)]

    def _is_due(self, every_s: float, name: Any) -> bool:
        """Tell whether something was not done for so long, and take it for done."""
        now = time.monotonic()
        if name in self._last_done and now - self._last_done[name] < every_s:
            return False
        self._last_done[name] = now
        return True

    # ------------------------------------------------------------------------------------------ instructions
    #
    # One method per instruction of `protocol/instructions.py`, where each says what it is for; those that have an
    # answer return it as an event. `_HANDLERS` at the end of the file leads here.

    def _execute(self, instruction: i.Instruction) -> None:
        handler: Callable[[Driver, Any], e.Event | None] = _HANDLERS[type(instruction)]
        began = time.perf_counter()
        event = handler(self, instruction)
        self.spent[type(instruction).__name__] += time.perf_counter() - began
        if event is not None:
            self.handle(event)

    # Registers

    def _read_generation(self, _: i.ReadGeneration) -> e.Event:
        return e.GenerationRead(decode_generation(self._registers.read(generation_key(self.member.incarnation))))

    def _propose_generation(self, proposal: i.ProposeGeneration) -> e.Event:
        expected = None if proposal.expected is None else encode(proposal.expected)
        stands = self._registers.swap(generation_key(self.member.incarnation), expected, encode(proposal.new))
        return e.GenerationRead(decode_generation(stands))

    def _try_commit(self, attempt: i.TryCommit) -> e.Event:
        self._reached("before_decide")
        stands = self._decisions.decide(attempt.tag, attempt.decision)
        self._reached("after_decide")
        if self._exchange is not None:
            self._exchange.announce_decision(attempt.tag.step)
        return e.DecisionRead(attempt.tag, stands)

    def _try_abort(self, attempt: i.TryAbort) -> e.Event:
        return e.DecisionRead(attempt.tag, self._decisions.decide(attempt.tag, Abort(attempt.generation)))

    def _end_generation(self, end: i.EndGeneration) -> e.Event:
        self._decisions.end(end.incarnation, end.number, Abort(end.by))
        return e.GenerationEnded(end.number)

    def _read_decision(self, read: i.ReadDecision) -> e.Event:
        until = time.monotonic() + self.job.settings.retry_s
        exchange, peer_wait = self._exchange, self._peer_wait

        def patient() -> bool:
            return time.monotonic() < until and peer_wait is not None and not peer_wait.dead()

        # On one host the leader announces the decision in shared memory: that is cheap to poll, the register is not.
        while exchange is not None and not exchange.may_be_decided(read.tag.step) and patient():
            time.sleep(_PAUSE_S)
        while (decision := self._decisions.read(read.tag)) is None and patient():
            time.sleep(_LOOK_S)
        return e.DecisionRead(read.tag, decision)

    # Who takes part

    def _settle(self, settle: i.Settle) -> None:
        record, job, seat = settle.generation, self.job, self.member.seat
        # First of all: no process that was left out may write into memory that is used from here on.
        for gone in settle.gone:
            self._known.ensure_dead(gone)
        self._close_generation()

        others = {member: self._known.peer(member) for member in record.members if member != seat}
        self._peer_wait = peer_wait = PeerWait(others, self._attend, job.silent_s)
        slots = {rank: own_slots(record, rank, job.per_micro_batch) for rank in record.ranks}
        layout = HostLayout(job.work.flat.size_bytes, job.work.flat.runs, slots)
        points = job.failpoints
        if job.open_transport is None or all(peer.here for peer in others.values()):
            self._exchange = HostExchange(seat, record, layout, job.rendezvous, peer_wait, points)
        else:
            self._exchange = NetExchange(seat, record, layout, job.rendezvous, peer_wait, points, job.open_transport)
        _log.info("generation %d: %s go on with step %d", record.number, name_ranks(record.ranks), record.step)
        self._known.refuse_to_be_left_alone(record, job.rank)

    def _ask_to_join(self, ask: i.AskToJoin) -> None:
        record, reachability = self.member.newest, self._reachability
        if record is None:
            return
        # Between hosts a process asks only once it has reached a member; which ones it cannot reach, it says.
        others = [seat for seat in record.members if seat.rank != self.job.rank]
        are_far = others and not any(self._known.peer(seat).here for seat in others)
        if are_far and self.member.phase is not MemberPhase.FETCHING and not reachability.may_ask(others):
            return
        if self._is_due(_ASK_AGAIN_S, ("join", record.number)):
            asking = Joining(ask.seat, tuple(sorted(self._transfer.unreached | reachability.unreached)))
            for seat in record.members:
                self.job.rendezvous.send(self.member.incarnation, seat, asking)

    def _offer_state(self, offer: i.OfferState) -> None:
        record, unreached = self.member.generation, self._listener.unreached
        if record is None:
            return
        # Of all members that have the state one gives it to each joiner; all of them choose alike.
        joining = [seat for seat in record.members if seat.rank in offer.joining]
        takers = [seat for seat in joining if choose_giver(seat, record, unreached.get(seat, ())) == self.member.seat]
        if takers and self._is_due(_ASK_AGAIN_S, (offer.tag, *takers)):
            self._transfer.offer(offer.tag, self.member.seat, takers, self._known)
            self._reached("offer")

    def _fetch_state(self, fetch: i.FetchState) -> e.Event | None:
        self.job.failpoints.step = fetch.tag.step
        self._reached("rejoin")
        self._waits_in = self._attempt_now
        return self._transfer.receive(fetch, self.member.seat, self._listener.addresses, self._peer_wait)

    # A step

    def _compute(self, compute: i.Compute) -> e.Event | None:
        if self._exchange is None or compute.tag != self.member.tag:
            return None
        return self._attempt.compute(compute, self._exchange)

    def _run_exchange(self, exchange: i.RunExchange) -> e.Event | None:
        if self._exchange is None or exchange.tag != self.member.tag:
            return None
        self._waits_in = self._attempt_now
        return self._attempt.reduce(exchange, self._exchange)

    def _publish_ack(self, publish: i.PublishAck) -> None:
        if self._exchange is not None:
            self._exchange.acknowledge(publish.ack)
            self._reached("after_ack")

    def _apply(self, apply: i.Apply) -> None:
        job, step, record = self.job, apply.tag.step, self.member.generation
        assert record is not None
        self._reached("before_apply")
        loss = job.work.apply(step, self._attempt.total, apply.decision.divisor, job.state.optimizer)
        job.state.advance()
        job.final.progressed(step + 1)
        self.digests.add(apply.tag, apply.decision.digest)
        self._transfer.withdraw()  # the state that was offered is no more
        self._reached("after_apply")
        now = time.monotonic()
        members = tuple(seat.rank for seat in apply.decision.members)
        if self.member.is_leader and self._exchange is not None:
            # Shift micro-batches away from a straggler, or drain it: the leader judges by everybody's own times.
            quotas = {rank: len(record.micro_batches_of(rank)) for rank in record.ranks}
            event = self.job.stragglers.add(record.number, quotas, self._exchange.own_times())
            if event is not None:
                self.handle(event)
        self._step = Step(step, loss, apply.decision.samples, members, record.number, now - self._applied_at)
        self._applied_at = now

    def _discard(self, _: i.Discard) -> None:
        """Sums that were thrown away are written over; what was computed of the step is used again."""

    def _checkpoint(self, checkpoint: i.Checkpoint) -> None:
        if self.job.checkpoints is not None and self.member.is_leader:
            self.job.checkpoints.begin(self.job.state.copied())
            self._reached("checkpoint")

    # Ends

    def _open_incarnation(self, opened: i.OpenIncarnation) -> None:
        # The newest state that was saved, or that this rank has kept at the end.
        saved = None if self.job.checkpoints is None else self.job.checkpoints.newest()
        kept = self.job.final.tree()
        newest = kept if saved is None or (kept is not None and kept["step"] > saved["step"]) else saved
        _log.warning(
            "no rank with state is left: training goes on from %s",
            "its beginning" if newest is None else f"the checkpoint of step {newest['step']}",
        )
        self._begin_again(self.job.rendezvous.open(opened.incarnation), newest or self._initial)

    def _leave(self, leave: i.Leave) -> None:
        _log.warning("rank %d leaves: %s", self.job.rank, leave.reason)
        self._begin_again(self.member.incarnation, None)

    def _keep_state(self, keep: i.KeepState) -> e.Event:
        self._reached("before_keep")
        digest = self.job.final.keep(self.job.state)
        self._reached("after_keep")
        return e.StateKept(keep.tag, f"{digest:016x}")

    def _finish(self, finish: i.Finish) -> None:
        job, without = self.job, finish.without

        # Have the final state: at hand, or as an earlier process of this rank has kept it.
        if finish.final and f"{job.state.digest():016x}" != finish.final:
            kept = job.final.tree(int(finish.final, 16))
            if kept is None:
                until = time.monotonic() + _WHERE_S
                while not (where := job.rendezvous.final()) and time.monotonic() < until:
                    time.sleep(_LOOK_S)
                lies = where or "the other ranks have it"
                raise FinalStateError(f"rank {job.rank} came too late for the final state: {lies}")
            job.state.load(kept)
        self.is_over = True
        try:
            job.final.keep(job.state)  # a process that was slower than the others may not have
        except FinalStateError as error:
            _log.warning("%s", error)  # it has it at hand

        # For ranks that have not got it, the lowest rank that has saves it, and publishes where it lies.
        if without and job.rank == min(set(range(job.settings.ranks)) - set(without)):
            path = job.final.save()
            where = f"it lies in {path} on {socket.gethostname()}" if path else f"rank {job.rank} has it"
            with contextlib.suppress(StoreGoneError):
                job.rendezvous.publish_final(where)
            names, lies = name_ranks(without), path or "this process alone"
            _log.warning("the job is over without %s: the final state lies in %s", names, lies)
        if 0 in without:
            _log.error("rank 0 does not come any more, so nobody runs its last lines with the final state")

        job.final.agree(attended=0 not in without)
        if job.state.step != job.settings.steps and not self._ends:
            self.reason = f"another rank ended the job after {job.state.step} steps"
        self._reached("after_end")

    def _halt(self, halt: i.Halt) -> None:
        raise RingsideError(halt.reason)

    def _save_state(self) -> None:
        """Write the state, all of whose steps are committed, because training cannot go on."""
        checkpoints = self.job.checkpoints
        if checkpoints is not None and self.member.step is not None:
            checkpoints.finish(_LAST_WRITE_S)
            try:
                _log.warning("the state is saved in %s", checkpoints.write(self.job.state.copied()))
            except Exception as error:
                _log.warning("the state cannot be saved in %s: %s", checkpoints.directory, error)


_HANDLERS: dict[type, Callable[[Driver, Any], e.Event | None]] = {
    i.ReadGeneration: Driver._read_generation,
    i.ProposeGeneration: Driver._propose_generation,
    i.TryCommit: Driver._try_commit,
    i.TryAbort: Driver._try_abort,
    i.EndGeneration: Driver._end_generation,
    i.ReadDecision: Driver._read_decision,
    i.Settle: Driver._settle,
    i.AskToJoin: Driver._ask_to_join,
    i.OfferState: Driver._offer_state,
    i.FetchState: Driver._fetch_state,
    i.Compute: Driver._compute,
    i.RunExchange: Driver._run_exchange,
    i.PublishAck: Driver._publish_ack,
    i.Apply: Driver._apply,
    i.Discard: Driver._discard,
    i.Checkpoint: Driver._checkpoint,
    i.OpenIncarnation: Driver._open_incarnation,
    i.Leave: Driver._leave,
    i.KeepState: Driver._keep_state,
    i.Finish: Driver._finish,
    i.Halt: Driver._halt,
}

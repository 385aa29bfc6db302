"""Carries out what the state machine of a member says: registers, memory, processes, PyTorch."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ringside.engine.failures import name_ranks
from ringside.errors import FinalStateError, MismatchError, RingsideError, StoreGoneError
from ringside.survive.all_reduce.between_hosts import NetExchange
from ringside.survive.all_reduce.one_host import HostExchange, HostLayout, own_slots
from ringside.survive.attempt import AnyExchange, Attempt
from ringside.survive.audit import SampleDigests
from ringside.survive.cluster.known_workers import KnownWorkers, take_seat
from ringside.survive.cluster.listener import WorkerListener
from ringside.survive.cluster.peers import Peer, comes_again, own_place
from ringside.survive.cluster.reachability import ReachabilityProbe, ReachabilityResponder
from ringside.survive.cluster.rendezvous import Joining, Rendezvous
from ringside.survive.cluster.waiting import PeerWait, Superseded
from ringside.survive.job import Step, SurviveJob
from ringside.survive.protocol import Member, MemberPhase
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import Abort, Decision, Decisions, MemberId, Tag
from ringside.survive.protocol.generation import Generation, decode_generation, encode_generation, generation_key
from ringside.survive.state.transfer import Handover, giver_for

_log = logging.getLogger("ringside")
_PAUSE_S = 2e-4
_LOOK_S = 2e-3
_ASK_AGAIN_S = 1.0
_LAST_WRITE_S = 120.0
_SAY_AGAIN_S = 30.0
_WHERE_S = 5.0


class Driver:
    """One worker's part in a job.

    Args:
        job: What is trained.

    Attributes:
        member: The state machine.
        reason: Why the job ended before its last step; "": it did not, or this rank wanted that.
        spent: Seconds by kind of instruction, and for digests (which `Exchange` contains).
        digests: Of the results that were applied here.
    """

    def __init__(self, job: SurviveJob) -> None:
        self.job = job
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.reason = ""
        self.digests = SampleDigests()
        self._initial = job.state.copied()
        self._todo: deque[i.Instruction] = deque()
        self._known = KnownWorkers(job.meeting, lambda seat: self._listener.silent_s(seat))
        self._attempt = Attempt(job, self.spent)
        self._handover = Handover(job)
        self._exchange: AnyExchange | None = None
        self._lookout: PeerWait | None = None
        self._doing: tuple[MemberPhase, Tag | None] | None = None
        self._asked: dict[Any, float] = {}
        self._ticked = self._applied_at = time.monotonic()
        self._step: Step | None = None
        self._life = 0
        self._founders: tuple[MemberId, ...] = ()
        self._ends = self._is_over = False
        self._decisions = Decisions(job.meeting.registers)
        self._begin(job.meeting.incarnation(), fresh=True)

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
                    self._go_on()
                except StoreGoneError:
                    self._go_on_without_store()
        except RingsideError:
            self._save()
            raise
        return self._step

    def _go_on(self) -> None:
        """Do what is to be done next, or rest."""
        heard = self._hear()
        if self._todo:
            self._carry_out(self._todo.popleft())
        elif not heard:
            self._rest()

    def _go_on_without_store(self) -> None:
        """End with the final state, where this rank has it; raise the error that is handled elsewhere."""
        if self.member.phase not in (MemberPhase.KEEPING, MemberPhase.CLOSING):
            raise
        _log.warning("the store is lost after the last step: rank %d ends with the state of that", self.job.rank)
        self._todo.clear()
        self._todo.extend(self.member.handle(e.StoreLost()))

    def end_job(self) -> None:
        """End the job for all ranks with the state that this one has; return when all have it.

        Where the others have gone on without this rank, it ends with the state that they have.

        Raises:
            RingsideError: As `next_step`.
        """
        self._ends = True
        while self.member.phase is not MemberPhase.ENDED or self._todo:
            self.tell(e.EndWanted())
            self.next_step()

    @property
    def is_over(self) -> bool:
        """Whether the job has come to its end, for all ranks."""
        return self._is_over

    def has_elders(self) -> bool:
        """Tell whether this process has joined others, and one that began the job takes part and lives."""
        elders = [seat for seat in self.member.members if seat in self._founders and seat != self.member.seat]
        return self.joined and any(not self._peer(seat).ended() for seat in elders)

    @property
    def joined(self) -> bool:
        """Whether this process takes part without having been there at the beginning."""
        return self.member.seat not in self._founders

    def close(self) -> None:
        """Let go of memory, peers and threads; wait for a checkpoint that is being written."""
        self._close_door()
        if self.job.checkpoints is not None:
            self.job.checkpoints.finish(_LAST_WRITE_S)
        self._let_go()
        self._known.close()

    # ------------------------------------------------------------------------------------------ beginning

    def _begin(self, incarnation: int, fresh: bool) -> None:
        """Claim a seat in an incarnation and start its state machine; without fresh state as one who joins."""
        job, meeting = self.job, self.job.meeting
        self._life += 1
        place = own_place(self._life, job.state.step if fresh else 0)
        seat = take_seat(meeting, self._known, incarnation, job.rank, place)
        job.phases.epoch, job.phases.incarnation = seat.epoch, incarnation
        self._handover.unreached.clear()
        self._open_door(seat, incarnation)
        self.member = Member(seat, incarnation, job.settings)
        if fresh:  # who was left out comes back to the same ones
            self._founders = self._await_founders(incarnation)
        step = job.state.step if seat in self._founders else None
        self.tell(e.Started(time.monotonic(), step, self._founders if step is not None else ()))

    def _open_door(self, seat: MemberId, incarnation: int) -> None:
        """Begin to listen, and to answer those who knock; be ready to knock."""
        job, carry = self.job, self.job.open_transport
        self._door = ReachabilityResponder(seat, incarnation, carry)
        self._knocker = None if carry is None else ReachabilityProbe(seat, incarnation, job.meeting, carry)
        mail = Rendezvous(job.listening.registers, job.listening.ranks)
        self._listener = WorkerListener(mail, incarnation, seat, self._door.answer)

    def _close_door(self) -> None:
        self._listener.close()
        self._door.close()
        if self._knocker is not None:
            self._knocker.close()

    def _await_founders(self, incarnation: int) -> tuple[MemberId, ...]:
        def alive(seat: MemberId) -> bool:
            return not self._known.peer(seat, incarnation).ended()

        come = self.job.meeting.founders(incarnation, self.job.founding_s, alive)
        steps = {seat: self._known.peer(seat, incarnation).place.step for seat in come}
        return tuple(seat for seat in come if steps[seat] == max(steps.values()))  # the others fetch the newest state

    def _begin_again(self, incarnation: int, tree: dict[str, Any] | None) -> None:
        """Forget this seat and take another; with a state to begin with, or none."""
        self._close_door()
        self._let_go()
        if tree is not None:
            self.job.state.load(tree)
        self._begin(incarnation, fresh=tree is not None)

    # ------------------------------------------------------------------------------------------ events

    def tell(self, event: e.Event) -> None:
        """Tell the member what has happened; what follows of it is done in turn."""
        self._tick()
        self._todo.extend(self.member.handle(event))

    def _tick(self) -> None:
        """Tell the member the time, if it does not know it: before anything else that it is told."""
        now = time.monotonic()
        if now - self._ticked > self.job.settings.retry_s / 2:
            self._ticked = now
            self._todo.extend(self.member.handle(e.Tick(now)))

    def _hear(self) -> bool:
        """Tell the member what has happened; return whether anything has."""
        record = self.member.generation
        if record is not None and len(record.members) == 1 and self._time_to(_ASK_AGAIN_S, "alone"):
            self._refuse_alone(record)
        found = [*self._listener.events(), *self._acks(), *self._deaths(), *self._missing()]
        for event in found:
            self.tell(event)
        return bool(found)

    def _rest(self) -> None:
        waits = self.member.phase in (MemberPhase.OUTSIDE, MemberPhase.CLOSING)
        time.sleep(_LOOK_S if waits else _PAUSE_S)
        self._tick()

    def _attend(self, suspects: Sequence[MemberId]) -> None:
        """Do what is to be done in the middle of a wait; raise `Superseded` once it leads nowhere."""
        doing, known = self._doing, self.member.change.suspects
        for event in (*self._listener.events(), *(e.PeerSuspected(seat) for seat in suspects if seat not in known)):
            self.tell(event)
        self._tick()
        while self._todo and self._at == doing:
            self._carry_out(self._todo.popleft())
        if self._at != doing:
            raise Superseded

    @property
    def _at(self) -> tuple[MemberPhase, Tag | None]:
        return self.member.phase, self.member.tag

    def _acks(self) -> Sequence[e.Event]:
        own = self.member.own
        if self._exchange is None or own is None or not self.member.is_leader:
            return []
        shown = self._exchange.acknowledgements(own.tag, bool(own.state))
        return [e.AckSeen(ack) for ack in shown if self.member.acks.get(ack.seat) != ack]

    def _deaths(self) -> Sequence[e.Event]:
        if self.member.step is None and self._nobody_left():
            return [e.NobodyLeft()]
        lookout, suspects = self._lookout, self.member.change.suspects
        return [] if lookout is None else [e.PeerSuspected(seat) for seat in lookout.dead() if seat not in suspects]

    def _missing(self) -> Sequence[e.Event]:
        """Find out at the end which of the ranks that are not there do not come any more."""
        record, member = self.member.generation, self.member
        if member.phase is not MemberPhase.CLOSING or not member.is_leader or record is None:
            return []
        missing = [rank for rank in range(self.job.settings.ranks) if rank not in record.ranks]
        if not missing or not self._time_to(_ASK_AGAIN_S / 4, "missing"):
            return []
        gone = tuple(rank for rank in missing if self._is_gone(rank))
        if self._time_to(_SAY_AGAIN_S, "waits"):
            _log.info("the last step is done: rank %s is waited for", ", ".join(map(str, missing)))
        return [] if member.gone == frozenset(gone) else [e.RanksGone(gone)]

    def _refuse_alone(self, record: Generation) -> None:
        """Raise `MismatchError` where all the other ranks were refused and none had been trained with, so that of two
        that differ nobody knows which one is right.

        Those that had been, and came back as others, are no reason to end what they were refused for.
        """
        if len(record.members) != 1:
            return
        others = [rank for rank in range(self.job.settings.ranks) if rank != self.job.rank]
        if others and all(self._was_never_right(rank) for rank in others):
            raise MismatchError(
                f"rank {self.job.rank} is the only one left, every other one was refused ({name_ranks(others)}): "
                "nobody can tell which of them is right. Their logs say what differs: make them alike, and start the "
                "job again"
            )

    def _was_never_right(self, rank: int) -> bool:
        """Tell whether a rank was refused before it took part, or for what it drew when it did."""
        meeting, incarnation = self.job.meeting, self.member.incarnation
        refused, seat = meeting.refused(rank), meeting.newest(incarnation, rank)
        place = None if seat is None else meeting.place(incarnation, seat)
        if refused is None or place is None:
            return refused is not None
        return (refused.machine, refused.pid, refused.started) == (place.machine, place.pid, place.started)

    def _is_gone(self, rank: int) -> bool:
        meeting, incarnation, machine = self.job.meeting, self.member.incarnation, own_place().machine
        seat, refused = meeting.newest(incarnation, rank), meeting.refused(rank)
        place = None if seat is None else meeting.place(incarnation, seat)
        if place is None or refused is None:
            return refused is not None or (place is not None and not comes_again(place, machine))
        if (refused.machine, refused.pid, refused.started) == (place.machine, place.pid, place.started):
            return True
        stranger = refused.keeper == place.keeper and not comes_again(replace(place, keeper=(0, 0)), machine)
        return stranger or not comes_again(place, machine)

    def _nobody_left(self) -> bool:
        record = self.member.newest
        if record is None or not self._time_to(_ASK_AGAIN_S / 4, "nobody left"):
            return False
        return not record.closed and all(self._peer(seat).ended() for seat in record.holders)

    def _time_to(self, every_s: float, what: Any) -> bool:
        """Tell whether something was not done for so long, and take it for done."""
        now = time.monotonic()
        if what in self._asked and now - self._asked[what] < every_s:
            return False
        self._asked[what] = now
        return True

    # ------------------------------------------------------------------------------------------ instructions

    def _carry_out(self, instruction: i.Instruction) -> None:
        handler: Callable[[Driver, Any], e.Event | None] = _HANDLERS[type(instruction)]
        began = time.perf_counter()
        event = handler(self, instruction)
        self.spent[type(instruction).__name__] += time.perf_counter() - began
        if event is not None:
            self.tell(event)

    def _read_generation(self, _: i.ReadGeneration) -> e.Event:
        data = self.job.meeting.registers.read(generation_key(self.member.incarnation))
        return e.GenerationRead(None if data is None else decode_generation(data))

    def _propose(self, wanted: i.ProposeGeneration) -> e.Event:
        expected = None if wanted.expected is None else encode_generation(wanted.expected)
        key = generation_key(self.member.incarnation)
        stands = self.job.meeting.registers.swap(key, expected, encode_generation(wanted.new))
        return e.GenerationRead(None if stands is None else decode_generation(stands))

    def _settle(self, settle: i.Settle) -> None:
        record, job = settle.generation, self.job
        for seat in settle.gone:
            self._known.bury(seat, record.incarnation)
        self._let_go()
        others = {seat: self._peer(seat) for seat in record.members if seat != self.member.seat}
        self._lookout = PeerWait(others, self._attend, job.patience)
        slots = {rank: own_slots(record, rank, job.per_micro_batch) for rank in record.ranks}
        layout = HostLayout(job.work.flat.size_bytes, job.work.flat.runs, slots)
        self._exchange = self._new_exchange(record, layout, self._lookout)
        ranks = ", ".join(map(str, record.ranks))
        _log.info("generation %d: ranks %s go on with step %d", record.number, ranks, record.step)
        self._refuse_alone(record)

    def _new_exchange(self, record: Generation, layout: HostLayout, lookout: PeerWait) -> AnyExchange:
        job, seat = self.job, self.member.seat
        if all(peer.here for peer in lookout.peers.values()) or job.open_transport is None:
            return HostExchange(seat, record, layout, job.meeting, lookout, job.phases)
        return NetExchange(seat, record, layout, job.meeting, lookout, job.phases, job.open_transport)

    def _ask_to_join(self, ask: i.AskToJoin) -> None:
        record = self.member.newest
        if record is None or not self._is_let_in(record):
            return
        if self._time_to(_ASK_AGAIN_S, ("join", record.number)):
            asking = Joining(ask.seat, tuple(sorted(self._unreached())))
            for seat in record.members:
                self.job.meeting.send(self.member.incarnation, seat, asking)

    def _is_let_in(self, record: Generation) -> bool:
        """Tell whether a member can be reached; between hosts that takes a while to be known."""
        others = [seat for seat in record.members if seat.rank != self.job.rank]
        if self._knocker is None or not others or any(self._peer(seat).here for seat in others):
            return True
        return self.member.phase is MemberPhase.FETCHING or self._knocker.let_in(others)

    def _unreached(self) -> set[MemberId]:
        return self._handover.unreached | (set() if self._knocker is None else self._knocker.unreached)

    def _offer_state(self, offer: i.OfferState) -> None:
        record, unreached = self.member.generation, self._listener.unreached
        if record is None:
            return
        joining = [seat for seat in record.members if seat.rank in offer.joining]
        takers = [seat for seat in joining if giver_for(seat, record, unreached.get(seat, ())) == self.member.seat]
        if takers and self._time_to(_ASK_AGAIN_S, (offer.tag, *takers)):
            self._handover.offer(offer.tag, self.member.seat, takers, self._known)
            self._reached("offer")

    def _fetch_state(self, fetch: i.FetchState) -> e.Event | None:
        self.job.phases.step = fetch.tag.step
        self._reached("rejoin")
        self._doing = self._at
        return self._handover.fetch(fetch, self.member.seat, self._listener.addresses, self._lookout)

    def _compute(self, compute: i.Compute) -> e.Event | None:
        if self._exchange is None or compute.tag != self.member.tag:
            return None
        return self._attempt.compute(compute, self._exchange)

    def _exchange_sums(self, wanted: i.RunExchange) -> e.Event | None:
        if self._exchange is None or wanted.tag != self.member.tag:
            return None
        self._doing = self._at
        return self._attempt.add_up(wanted, self._exchange)

    def _publish(self, publish: i.PublishAck) -> None:
        if self._exchange is not None:
            self._exchange.acknowledge(publish.ack)
            self._reached("after_ack")

    def _try_commit(self, attempt: i.TryCommit) -> e.Event:
        self._reached("before_decide")
        answer = self._decide(attempt.tag, attempt.decision)
        self._reached("after_decide")
        if self._exchange is not None:
            self._exchange.ring(attempt.tag.step)
        return answer

    def _try_abort(self, attempt: i.TryAbort) -> e.Event:
        return self._decide(attempt.tag, Abort(attempt.generation))

    def _end_generation(self, end: i.EndGeneration) -> e.Event:
        self._decisions.end(end.incarnation, end.number, Abort(end.by))
        return e.GenerationEnded(end.number)

    def _decide(self, tag: Tag, decision: Decision) -> e.DecisionRead:
        return e.DecisionRead(tag, self._decisions.decide(tag, decision))

    def _read_decision(self, read: i.ReadDecision) -> e.Event:
        until = time.monotonic() + self.job.settings.retry_s
        exchange, lookout = self._exchange, self._lookout

        def patient() -> bool:
            return time.monotonic() < until and lookout is not None and not lookout.dead()

        while exchange is not None and not exchange.rung(read.tag.step) and patient():
            time.sleep(_PAUSE_S)
        while (decision := self._decisions.read(read.tag)) is None and patient():
            time.sleep(_LOOK_S)
        return e.DecisionRead(read.tag, decision)

    def _apply(self, apply: i.Apply) -> None:
        job, step, record = self.job, apply.tag.step, self.member.generation
        assert record is not None
        self._reached("before_apply")
        loss = job.work.apply(step, self._attempt.total, apply.decision.divisor, job.optimizer)
        job.on_apply()
        job.state.step = step + 1
        job.final.progressed(step + 1)
        self.digests.add(apply.tag, apply.decision.digest)
        self._handover.take_back()
        self._reached("after_apply")
        now = time.monotonic()
        members = tuple(seat.rank for seat in apply.decision.members)
        self._watch_stragglers(record)
        self._step = Step(step, loss, apply.decision.samples, members, record.number, now - self._applied_at)
        self._applied_at = now

    def _watch_stragglers(self, record: Generation) -> None:
        if self.member.is_leader and self._exchange is not None:
            quotas = {rank: len(record.micro_batches_of(rank)) for rank in record.ranks}
            wanted = self.job.stragglers.add(record.number, quotas, self._exchange.own_times())
            if wanted is not None:
                self.tell(wanted)

    def _checkpoint(self, checkpoint: i.Checkpoint) -> None:
        if self.job.checkpoints is not None and self.member.is_leader:
            self.job.checkpoints.begin(self.job.state.copied())
            self._reached("checkpoint")

    def _open_incarnation(self, opened: i.OpenIncarnation) -> None:
        newest = self._newest()
        _log.warning(
            "nobody who held state is left: training goes on from %s",
            "its beginning" if newest is None else f"the checkpoint of step {newest['step']}",
        )
        self._begin_again(self.job.meeting.open(opened.incarnation), newest or self._initial)

    def _newest(self) -> dict[str, Any] | None:
        """Return the newest state that was saved, or kept at the end by this rank; None: there is none."""
        saved = None if self.job.checkpoints is None else self.job.checkpoints.newest()
        kept = self.job.final.tree()
        return kept if saved is None or (kept is not None and kept["step"] > saved["step"]) else saved

    def _leave(self, leave: i.Leave) -> None:
        _log.warning("rank %d leaves: %s", self.job.rank, leave.reason)
        self._begin_again(self.member.incarnation, None)

    def _keep_state(self, keep: i.KeepState) -> e.Event:
        self._reached("before_keep")
        digest = self.job.final.keep(self.job.state)
        self._reached("after_keep")
        return e.StateKept(keep.tag, f"{digest:016x}")

    def _finish(self, finish: i.Finish) -> None:
        job = self.job
        if finish.final and f"{job.state.digest():016x}" != finish.final:
            kept = job.final.tree(int(finish.final, 16))
            if kept is None:
                raise FinalStateError(self._lost())
            job.state.load(kept)
        self._is_over = True
        try:
            job.final.keep(job.state)  # a process that was slower than the others may not have
        except FinalStateError as error:
            _log.warning("%s", error)  # it has it at hand
        if finish.without:
            self._go_without(finish.without)
        job.final.agree(attended=0 not in finish.without)
        if job.state.step != job.settings.steps and not self._ends:
            self.reason = f"another rank ended the job after {job.state.step} steps"
        self._reached("after_end")

    def _lost(self) -> str:
        """Say where the final state lies that this rank cannot have."""
        until = time.monotonic() + _WHERE_S
        while not (where := self.job.meeting.final()) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return f"rank {self.job.rank} came too late for the final state: {where or 'the other ranks have it'}"

    def _go_without(self, without: Sequence[int]) -> None:
        """Some ranks have not got the final state: the lowest that has it says where it lies."""
        job, names = self.job, name_ranks(tuple(without))
        if job.rank == min(set(range(job.settings.ranks)) - set(without)):
            path = job.final.save()
            where = f"it lies in {path} on {socket.gethostname()}" if path else f"rank {job.rank} has it"
            with contextlib.suppress(StoreGoneError):
                job.meeting.say_final(where)
            _log.warning("the job is over without %s: the final state lies in %s", names, path or "this process alone")
        if 0 in without:
            _log.error("rank 0 does not come any more, so nobody runs its last lines with the final state")

    def _halt(self, halt: i.Halt) -> None:
        raise RingsideError(halt.reason)

    def _nothing(self, _: i.Discard) -> None:
        """Sums that were thrown away are written over; what was computed of the step is used again."""

    # ------------------------------------------------------------------------------------------ small things

    def _peer(self, seat: MemberId) -> Peer:
        return self._known.peer(seat, self.member.incarnation)

    def _reached(self, phase: str) -> None:
        self.job.phases.reached(phase)

    def _let_go(self) -> None:
        """Let go of the generation's memory and processes."""
        self._handover.take_back()
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._lookout = None
        self._known.forget()

    def _save(self) -> None:
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
    i.ProposeGeneration: Driver._propose,
    i.Settle: Driver._settle,
    i.AskToJoin: Driver._ask_to_join,
    i.OfferState: Driver._offer_state,
    i.FetchState: Driver._fetch_state,
    i.Compute: Driver._compute,
    i.RunExchange: Driver._exchange_sums,
    i.PublishAck: Driver._publish,
    i.TryCommit: Driver._try_commit,
    i.TryAbort: Driver._try_abort,
    i.EndGeneration: Driver._end_generation,
    i.ReadDecision: Driver._read_decision,
    i.Apply: Driver._apply,
    i.Discard: Driver._nothing,
    i.Checkpoint: Driver._checkpoint,
    i.OpenIncarnation: Driver._open_incarnation,
    i.Leave: Driver._leave,
    i.KeepState: Driver._keep_state,
    i.Finish: Driver._finish,
    i.Halt: Driver._halt,
}

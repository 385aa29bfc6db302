"""One member of a job as a state machine without I/O: events in, instructions out, replayable.

A training step is a transaction. A healthy one of members 0 (the leader), 1 and 2; `decide` and `generation` are
registers (`registers.py`), everything between members is a message that says its tag::

      0                      1                      2            decide(step k, generation g)
      │ Compute(k, g)        │ Compute(k, g)        │ Compute(k, g)
      │→WorkDone             │→WorkDone             │→WorkDone
      │ Exchange ◄──────────►│ Exchange ◄──────────►│ Exchange
      │→ResultReady          │→ResultReady          │→ResultReady          each has a private copy now
      │◄──────────PublishAck─│ ReadDecision ···     │
      │◄──────────PublishAck─┼──────────────────────│ ReadDecision ···
      │→AckSeen ×2: all digests equal                                    │
      │ TryCommit ──────────────────────────────────────────────────────►│ COMMIT
      │→DecisionRead(COMMIT) │→DecisionRead(COMMIT) │→DecisionRead(COMMIT)
      │ Apply, Compute(k+1)  │ Apply, Compute(k+1)  │ Apply, Compute(k+1)

Member 2 dies in step k; whoever notices first replaces the generation, and both settle step k in the old one::

      0                      1                                     generation     decide(k, g)
      │                      │→PeerSuspected(2)                    g
      │                      │ ProposeGeneration(g → g+1 = {0, 1})►g+1
      │→NewerHeardOf, or Tick│→GenerationRead(g+1)                 │
      │ ReadGeneration ─────────────────────────────────────────── │
      │→GenerationRead(g+1)  │ TryAbort(k, g) ────────────────────────────────►│ ABORT, if COMMIT does not stand
      │ TryAbort(k, g) ───────────────────────────────────────────────────────►│
      │→DecisionRead(ABORT)  │→DecisionRead(ABORT)       (→DecisionRead(COMMIT): Apply, and TryAbort(k+1, g))
      │ Discard              │ Discard
      │ Settle(g+1)          │ Settle(g+1)               fresh memory; 2 is killed and awaited where it is at hand
      │ Compute(k, g+1)      │ Compute(k, g+1)           only what 2 owed; the rest was computed already

A process joins; members go on with their micro-batches while it fetches, and the step waits for its acknowledgement::

      0 (leader)             1                      3 (new, or back with a new epoch)
      │                      │                      │ Started(step=None), ReadGeneration, AskToJoin ··· every tick
      │→JoinRequested(3)     │→JoinRequested(3)     │
      │ after step k: ProposeGeneration({0, 1, 3}, joining 3)
      │ TryAbort(k+1, g), Settle(g+1), OfferState(k+1) ────►│→StateOffered
      │ Compute(k+1, g+1)    │ the same             │ Settle(g+1), FetchState ─►StateFetched: digest as offered
      │                      │                      │ Compute(k+1, g+1)

All who held state are gone: a process without state gets `NobodyLeft`, closes the generation register, fences every
generation that may still commit (`fence.py`), and is told `OpenIncarnation`.

Why no sample counts twice or never:

1.  COMMIT needs the acknowledgement of every member, so whoever reads it has the copy, or is no member any more.
2.  ABORT is written only once a later generation stands. A member enters a later generation only after it has aborted
    its step in its own, or has applied what stands there; from then on it acknowledges nothing in the old one, so
    nothing can be committed there, nor in a generation that it skipped.
3.  Both stand in one register that is written once: a leader that wakes up late reads ABORT.
4.  What a member is at differs by one step at most (rule 1), so all enter a generation at the same step, and state
    that is offered stays as it is until those who join have acknowledged (rule 1 again).
5.  Seats carry an epoch: a process that was left out cannot come back as the one it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.decision import Commit, Seat, Tag
from ringside.survive.fence import Fence
from ringside.survive.generation import Generation
from ringside.survive.settings import Settings
from ringside.survive.succession import Wishes, closing, successor

Instructions = list[i.Instruction]
_ASK = (i.ReadGeneration, i.ProposeGeneration, i.TryCommit, i.TryAbort, i.ReadDecision)


class Phase(Enum):
    """What a member is about."""

    OUTSIDE = "outside"  # no member (yet)
    FETCHING = "fetching"  # a member without state
    WORKING = "working"  # computes its micro-batches
    EXCHANGING = "exchanging"  # all-reduces
    VOTING = "voting"  # has a private copy, waits for the decision
    RESOLVING = "resolving"  # a later generation stands; settles its step in its own
    FENCING = "fencing"  # gives an incarnation up
    CLOSING = "closing"  # has applied the last step, closes the incarnation
    ENDED = "ended"


class Member:
    """One process of one incarnation.

    Its attributes are values that are replaced, never changed in place: `copy.copy` makes an independent member, and
    equal `key`s mean equal behaviour from here on.

    Args:
        seat: Which process.
        incarnation: Which incarnation of the job.
        settings: Equal on all members.

    Attributes:
        phase: What it is about.
        generation: The generation in force for it; None: none yet.
        newest: The newest generation it has read of.
        step: The next step its state is good for; None: no state.
        own: Its acknowledgement of the private copy it holds; None: it holds none.
        acks: The newest acknowledgement of every member.
        wishes: What it would change in the membership.
        now: The time it was told last, seconds.
    """

    def __init__(self, seat: Seat, incarnation: int, settings: Settings) -> None:
        self.seat, self.incarnation, self.settings = seat, incarnation, settings
        self.phase = Phase.OUTSIDE
        self.generation: Generation | None = None
        self.newest: Generation | None = None
        self.step: int | None = None
        self.own: e.Acknowledgement | None = None
        self.acks: dict[Seat, e.Acknowledgement] = {}
        self.wishes = Wishes()
        self._founders: tuple[Seat, ...] = ()
        self._entered_at = -1
        self._offer: e.Offer | None = None
        self._fence: Fence | None = None
        self._proposal: Generation | None = None
        self.now = self._since = self._asked = 0.0
        self._unanswered: float | None = None

    # ------------------------------------------------------------------------------------------ what there is to see

    @property
    def tag(self) -> Tag | None:
        """The attempt it is at: what messages of its own say, and what messages of others must say."""
        if self.phase is Phase.FETCHING:
            return None if self._offer is None else self._offer.tag
        return None if self.generation is None or self.step is None else self.generation.tag(self.step)

    @property
    def is_leader(self) -> bool:
        """Whether it counts acknowledgements in the generation in force."""
        return self.generation is not None and self._is(self.generation.leader)

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that its further behaviour depends on, hashable, but for the settings and the time."""
        timeless = (self.seat, self.incarnation, self.phase, self.generation, self.newest, self.step, self.own)
        acks = tuple(sorted(self.acks.items()))
        return (
            *timeless,
            acks,
            self.wishes,
            self._founders,
            self._entered_at,
            self._offer,
            self._fence,
            self._proposal,
        )

    def handle(self, event: e.Event) -> Instructions:
        """Take an event; return what is to be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        handler: Callable[[Member, Any], Instructions] = _HANDLERS[type(event)]
        found = handler(self, event)
        if self._unanswered is None and any(isinstance(instruction, _ASK) for instruction in found):
            self._unanswered = self.now
        return found

    # ------------------------------------------------------------------------------------------ beginning and time

    def _started(self, event: e.Started) -> Instructions:
        self.now, self.step, self._founders = event.now, event.step, event.founders
        return [i.ReadGeneration()]

    def _found(self) -> Instructions:
        """Nothing stands in the generation register: make the first one, if this process may."""
        if self.step is None or self.seat not in self._founders:
            return []
        ranks = tuple(seat.rank for seat in self._founders)
        quotas = self.settings.quotas(ranks, self.settings.micro_batches)
        owners = tuple(rank for rank, quota in zip(ranks, quotas, strict=True) for _ in range(quota))
        return [i.ProposeGeneration(None, Generation(self.incarnation, 1, self.step, 0, self._founders, owners))]

    def _tick(self, event: e.Tick) -> Instructions:
        self.now = event.now
        if self._unanswered is not None and self.now - self._unanswered > self.settings.store_patience_s:
            return self._store_is_gone()
        if self.now - self._asked < self.settings.retry_s:
            return []
        self._asked, self._proposal = self.now, None
        return [i.ReadGeneration(), *_AGAIN[self.phase](self)]

    def _store_is_gone(self) -> Instructions:
        if self.phase is Phase.CLOSING:
            return self._end(i.Finish())
        patience = self.settings.store_patience_s
        return self._end(i.Halt(f"the store has not answered for {patience:g} s: start the job again, it resumes"))

    def _vote_again(self) -> Instructions:
        """Repeat what may have been lost; suspect whoever keeps a member with a private copy waiting too long."""
        waited, patience = self.now - self._since, self._patience_s()
        if self.is_leader and waited > patience:
            self._suspect(*(seat for seat in self._members() if not self._acknowledged(seat)))
        elif not self.is_leader and waited > 2 * patience:
            self._suspect(*self._members()[:1])
        return [*self._consider(), *self._publish()]

    def _patience_s(self) -> float:
        fetching = self.generation is not None and self.generation.joining and self.step == self._entered_at
        return self.settings.fetch_patience_s if fetching else self.settings.patience_s

    def _fetch_again(self) -> Instructions:
        """Ask for another offer; where nobody brought state and nobody has offered any, there is none."""
        nobody = self.generation is not None and not self.generation.holders and self._offer is None
        if nobody and self.now - self._since > self.settings.patience_s:
            return self._give_up()
        return self._ask_to_join()

    # ------------------------------------------------------------------------------------------ generations

    def _generation_read(self, event: e.GenerationRead) -> Instructions:
        self._unanswered = None
        record = event.generation
        if record is None:
            return self._found()
        if self.newest is not None and record.number <= self.newest.number:
            return []
        self.newest, self._proposal, self.wishes = record, None, self.wishes.left_after(record)
        return self._superseded(record)

    def _superseded(self, record: Generation) -> Instructions:
        if self.phase is Phase.CLOSING:
            return self._close()
        if self.phase is Phase.RESOLVING:
            return []  # first the old one
        if self.generation is None or self.step is None or not self.settings.rules.abort_first:
            return self._enter()
        self.phase, self._since = Phase.RESOLVING, self.now
        if not self.settings.rules.keep_copy:
            self.own = None
        return self._abort()

    def _abort(self) -> Instructions:
        tag, record = self.tag, self.newest
        return [] if tag is None or record is None else [i.TryAbort(tag, record.number)]

    def _enter(self) -> Instructions:
        """Go into the newest generation: nothing is open in the one before."""
        record, before = self.newest, self.generation
        assert record is not None
        if not any(self._is(seat) for seat in record.members):
            return self._stay_outside(record)
        if before is None and self.step is not None and self.step != record.step:
            return self._end(i.Leave(f"{self.seat} has state of step {self.step}, not {record.step}", rejoin=True))
        self.generation, self.own, self._offer = record, None, None
        self.acks = {seat: ack for seat, ack in self.acks.items() if seat in record.members}
        gone = () if before is None else tuple(sorted(set(before.members) - set(record.members)))
        settled: Instructions = [i.Settle(record, gone)]
        if self.step is None:
            self.phase, self._since = Phase.FETCHING, self.now
            return [*settled, *self._consider()]
        self.phase, self._entered_at = Phase.WORKING, self.step
        return [*settled, *self._offer_state(), *self._next()]

    def _stay_outside(self, record: Generation) -> Instructions:
        if record.over:
            return self._end(i.Leave("the job is over: its last step is committed", rejoin=False))
        if self.seat.rank in record.drained:
            return self._end(i.Leave("this rank was drained: it held the others up", rejoin=False))
        if record.closed and self.step is None:
            return self._build_fence(record)
        if self.generation is not None:
            return self._end(i.Leave(f"generation {record.number} goes on without {self.seat}", rejoin=True))
        self.phase, self.step = Phase.OUTSIDE, None  # whoever would have founded the job joins like anybody
        return [i.AskToJoin(self.seat)]

    def _ask_to_join(self) -> Instructions:
        """Ask; a member without state asks for an offer by the same message."""
        return [*self._consider(), i.AskToJoin(self.seat)]

    # ------------------------------------------------------------------------------------------ a step

    def _next(self, between_steps: bool = False) -> Instructions:
        """Begin the step, or end the job; after a step the leader changes what can wait until then.

        Not when a generation begins: whoever comes and goes again and again would keep the others from every step.
        """
        if self.settings.steps is not None and self.step is not None and self.step >= self.settings.steps:
            return self._close()
        tag, record = self.tag, self.generation
        assert tag is not None
        assert record is not None
        self.phase, self._since = Phase.WORKING, self.now
        mine = record.micro_batches_of(self.seat.rank)
        return [*self._consider(between_steps), i.Compute(tag, mine, self.step == self._entered_at)]

    def _work_done(self, event: e.WorkDone) -> Instructions:
        if event.tag != self.tag or self.phase is not Phase.WORKING or self.generation is None:
            return []
        self.phase, self._since = Phase.EXCHANGING, self.now
        return [i.Exchange(event.tag, self.generation)]

    def _attempt_failed(self, event: e.AttemptFailed) -> Instructions:
        if event.tag != self.tag or self.phase is not Phase.EXCHANGING:
            return []
        self._suspect(*event.suspects)
        broken = self.wishes.broken | set(event.broken)
        self.wishes = replace(self.wishes, broken=broken, again=not event.suspects and not event.broken)
        return self._consider()

    def _result_ready(self, event: e.ResultReady) -> Instructions:
        if event.tag != self.tag or self.phase is not Phase.EXCHANGING:
            return []
        self.phase, self._since = Phase.VOTING, self.now
        self.own = e.Acknowledgement(event.tag, self.seat, event.digest, event.state)
        self.acks = {**self.acks, self.seat: self.own}
        early = [] if self.settings.rules.committed_only else self._checkpoint(event.tag.step + 1)
        if not self.settings.rules.read_first:
            return self._committed(self._commit(event.tag, event.digest))
        return [*early, *self._publish()]

    def _publish(self) -> Instructions:
        """Tell the leader of the private copy, and look for the decision; the leader counts instead."""
        if self.own is None or self.generation is None:
            return []
        if self.is_leader:
            return self._count()
        return [i.PublishAck(self.own, self.generation.leader), i.ReadDecision(self.own.tag)]

    def _ack_seen(self, event: e.AckSeen) -> Instructions:
        ack, newest = event.ack, self.newest
        known = self.acks.get(ack.seat)
        if newest is None or ack.tag.incarnation != self.incarnation or (known and known.tag >= ack.tag):
            return []
        if ack.seat not in (*self._members(), *newest.members):
            return []
        self.acks = {**self.acks, ack.seat: ack}
        newer = ack.tag.generation > newest.number
        return [*([i.ReadGeneration()] if newer else []), *self._count()]

    def _count(self) -> Instructions:
        """COMMIT, once the leader knows that every member holds the same private copy."""
        tag, rules = self.tag, self.settings.rules
        if self.phase is not Phase.VOTING or not self.is_leader or tag is None or self.own is None:
            return []
        if rules.every_ack and not all(self._acknowledged(seat) for seat in self._members()):
            return []
        said = {seat: (ack.digest, ack.state) for seat, ack in self.acks.items() if ack.tag == tag}
        if rules.equal_digests and len(set(said.values())) > 1:
            return self._differ(said)
        return [i.TryCommit(tag, self._commit(tag, self.own.digest))]

    def _differ(self, said: dict[Seat, tuple[str, str]]) -> Instructions:
        """Try once more; the second time whoever is not with the majority goes, and comes back with its state."""
        [(usual, votes)] = Counter(said.values()).most_common(1)
        again = not (self.generation and self.generation.attempt and 2 * votes > len(said))
        others = () if again else (seat for seat, result in said.items() if result != usual)
        self.wishes = replace(self.wishes, again=again, suspects=self.wishes.suspects.union(others))
        return self._consider()

    def _acknowledged(self, seat: Seat) -> bool:
        ack = self.acks.get(seat)
        return ack is not None and (ack.tag == self.tag or not self.settings.rules.tagged_acks)

    def _commit(self, tag: Tag, digest: str) -> Commit:
        first, samples = self.settings.samples(tag.step)
        return Commit(self._members(), first, samples, samples if self.settings.mean else 1, digest)

    # ------------------------------------------------------------------------------------------ decisions

    def _decision_read(self, event: e.DecisionRead) -> Instructions:
        self._unanswered = None
        if self.phase is Phase.FENCING:
            return self._fence_on(event)
        if event.decision is None or event.tag != self.tag:
            return []
        taken = self.settings.rules.take_commit or self.phase is not Phase.RESOLVING
        if isinstance(event.decision, Commit) and taken:
            return self._committed(event.decision)
        if self.phase is Phase.RESOLVING:
            self.own = None
            return [i.Discard(event.tag), *self._enter()]
        return [i.ReadGeneration()]  # a later generation stands, or there would be no ABORT

    def _committed(self, decision: Commit) -> Instructions:
        tag, own, rules = self.tag, self.own, self.settings.rules
        assert tag is not None
        assert self.step is not None
        if own is None or own.tag != tag or (rules.equal_digests and own.digest != decision.digest):
            return self._end(i.Leave(f"{tag} is committed, and {self.seat} holds another result", rejoin=True))
        self.step, self.own = self.step + 1, None
        saved = self._checkpoint(self.step) if rules.committed_only else []
        applied: Instructions = [i.Apply(tag, decision), *saved]
        if self.phase is Phase.RESOLVING and self.step != self.settings.steps:
            return [*applied, *self._abort()]
        return [*applied, *self._next(between_steps=True)]

    def _checkpoint(self, step: int) -> Instructions:
        every = self.settings.checkpoint_every
        return [i.Checkpoint(step)] if every and step % every == 0 else []

    # ------------------------------------------------------------------------------------------ who takes part

    def _consider(self, between_steps: bool = False) -> Instructions:
        """Propose another membership, if one is needed and not under way."""
        base = self.newest
        if base is None or self.phase in (Phase.FENCING, Phase.CLOSING):
            return []
        if not any(self._is(seat) for seat in base.members):
            return []
        patient = between_steps and self._is(base.leader) and self.wishes.patient(base)
        if not self.wishes.urgent(base) and not patient:
            return []
        wanted = successor(base, self.wishes, self.step, self._is_settled(), self.settings.quotas)
        trouble = self._trouble(wanted)
        if trouble:
            return self._end(i.Halt(trouble))
        if wanted == self._proposal:
            return []
        self._proposal = wanted
        return [i.ProposeGeneration(base, wanted)]

    def _trouble(self, wanted: Generation) -> str:
        least, most = self.settings.least_members, self.settings.most_attempts
        if len(wanted.members) < least:
            return f"{len(wanted.members)} ranks are left and {least} are needed: start the job again, it resumes"
        if wanted.attempt >= most:
            return (
                f"step {wanted.step} was begun {most} times in vain: see the log for exchanges that fail each time; "
                "if there are none, ranks compute different results"
            )
        return ""

    def _is_settled(self) -> bool:
        return self.step is not None and self.generation is not None and self.generation == self.newest

    def _suspect(self, *seats: Seat) -> None:
        others = {seat for seat in seats if not self._is(seat)}
        self.wishes = replace(self.wishes, suspects=self.wishes.suspects | others)

    def _peer_suspected(self, event: e.PeerSuspected) -> Instructions:
        self._suspect(event.seat)
        return self._consider()

    def _join_requested(self, event: e.JoinRequested) -> Instructions:
        base = self.newest
        if base is not None and event.seat in base.members:
            return self._offer_state()
        self.wishes = replace(self.wishes, newcomers=self.wishes.newcomers | {event.seat})
        return self._consider()

    def _drain_wanted(self, event: e.DrainWanted) -> Instructions:
        self.wishes = replace(self.wishes, drains=self.wishes.drains | {event.rank})
        return []

    def _quotas_wanted(self, event: e.QuotasWanted) -> Instructions:
        self.wishes = replace(self.wishes, quotas=event.quotas)
        return []

    def _newer_heard_of(self, event: e.NewerHeardOf) -> Instructions:
        return [i.ReadGeneration()]

    # ------------------------------------------------------------------------------------------ state for newcomers

    def _offer_state(self) -> Instructions:
        record, tag = self.generation, self.tag
        if record is None or tag is None or self.step != self._entered_at or self.phase is Phase.RESOLVING:
            return []
        joining = tuple(rank for rank in record.joining if rank != self.seat.rank)
        return [i.OfferState(tag, joining)] if joining else []

    def _state_offered(self, event: e.StateOffered) -> Instructions:
        offer, record = event.offer, self.generation
        if self.phase is not Phase.FETCHING or record is None or self._offer is not None:
            return []
        if offer.tag != record.tag(offer.tag.step) or offer.seat not in record.members:
            return []
        self._offer = offer
        return [i.FetchState(offer.seat, offer.tag, offer.digest)]

    def _state_fetched(self, event: e.StateFetched) -> Instructions:
        if self.phase is not Phase.FETCHING or self._offer is None or event.tag != self._offer.tag:
            return []
        if event.digest != self._offer.digest and self.settings.rules.verify_state:
            return self._fetch_failed(e.FetchFailed(event.tag))
        self.step = self._entered_at = event.tag.step
        return self._next()

    def _fetch_failed(self, event: e.FetchFailed) -> Instructions:
        if self._offer is not None and event.tag == self._offer.tag:
            self._offer = None  # the next tick asks for another
        return []

    # ------------------------------------------------------------------------------------------ ends

    def _nobody_left(self, event: e.NobodyLeft) -> Instructions:
        return self._give_up() if self.step is None else []

    def _give_up(self) -> Instructions:
        """Close the incarnation, so that no generation follows; what may still be committed is fenced off then."""
        if self.newest is None:
            return []
        self.phase, self._since = Phase.FENCING, self.now
        return self._close_again()

    def _close(self) -> Instructions:
        """Close the incarnation after its last step; only then is it over for this member."""
        self.phase, record = Phase.CLOSING, self.newest
        assert record is not None
        if record.closed:
            return self._end(i.Finish())
        return [i.ProposeGeneration(record, closing(record, self._is_settled(), over=True))]

    def _close_again(self) -> Instructions:
        record = self.newest
        if record is None or self._fence is not None:
            return self._fence_again()
        return [i.ProposeGeneration(record, closing(record, settled=False, over=False))]

    def _build_fence(self, closed: Generation) -> Instructions:
        self.phase, self._fence = Phase.FENCING, Fence.around(closed)
        return self._fence_again()

    def _fence_again(self) -> Instructions:
        if self._fence is None:
            return []
        if self._fence.done or not self.settings.rules.fence:
            return self._end(i.OpenIncarnation(self.incarnation + 1))
        return [i.TryAbort(self._fence.tag, self._fence.closed.number)]

    def _fence_on(self, event: e.DecisionRead) -> Instructions:
        if self._fence is None or event.decision is None or event.tag != self._fence.tag:
            return []
        self._fence = self._fence.after(event.decision)
        return self._fence_again()

    def _end(self, last: i.Instruction) -> Instructions:
        self.phase = Phase.ENDED
        return [last]

    # ------------------------------------------------------------------------------------------ small things

    def _members(self) -> tuple[Seat, ...]:
        return () if self.generation is None else self.generation.members

    def _is(self, seat: Seat) -> bool:
        return seat == self.seat or (seat.rank == self.seat.rank and not self.settings.rules.epochs)


_HANDLERS: dict[type, Callable[[Member, Any], Instructions]] = {
    e.Started: Member._started,
    e.Tick: Member._tick,
    e.GenerationRead: Member._generation_read,
    e.DecisionRead: Member._decision_read,
    e.NewerHeardOf: Member._newer_heard_of,
    e.WorkDone: Member._work_done,
    e.ResultReady: Member._result_ready,
    e.AttemptFailed: Member._attempt_failed,
    e.AckSeen: Member._ack_seen,
    e.PeerSuspected: Member._peer_suspected,
    e.JoinRequested: Member._join_requested,
    e.StateOffered: Member._state_offered,
    e.StateFetched: Member._state_fetched,
    e.FetchFailed: Member._fetch_failed,
    e.NobodyLeft: Member._nobody_left,
    e.DrainWanted: Member._drain_wanted,
    e.QuotasWanted: Member._quotas_wanted,
}

_AGAIN: dict[Phase, Callable[[Member], Instructions]] = {
    Phase.OUTSIDE: Member._ask_to_join,
    Phase.FETCHING: Member._fetch_again,
    Phase.WORKING: Member._consider,
    Phase.EXCHANGING: Member._consider,
    Phase.VOTING: Member._vote_again,
    Phase.RESOLVING: lambda member: [*member._consider(), *member._abort()],
    Phase.FENCING: Member._close_again,
    Phase.CLOSING: Member._close,
}

__all__ = ["Member", "Phase"]

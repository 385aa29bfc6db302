"""One member of a job as a state machine without I/O: events in, instructions out, replayable.

`Member` is the machine: an event goes to its handler, and what is unanswered is asked again. `state` is what a member
knows. `transitions` are the handlers: entering generations, the work of a step, voting on its result, deciding,
membership, joining, and the end. `generation` and `decision` are the two registers, `events` and `instructions` what
goes in and comes out, `settings` its patience. Here is how it all goes, and why it is right.

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
      │→Tick                 │→GenerationRead(g+1)                 │
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
generation that may still commit (`generation.py`), and is told `OpenIncarnation`.

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

from collections.abc import Callable
from typing import Any

from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol import transitions
from ringside.survive.protocol.state import Instructions, MemberPhase, MemberState

__all__ = ["Member", "MemberPhase"]

_REGISTER_CALLS = (i.ReadGeneration, i.ProposeGeneration, i.TryCommit, i.TryAbort, i.EndGeneration, i.ReadDecision)


class Member(MemberState):
    """One process of one incarnation; see `MemberState` for its arguments and attributes."""

    def handle(self, event: e.Event) -> Instructions:
        """Take an event; return what is to be done, in order."""
        if self.phase is MemberPhase.ENDED:
            return []
        instructions = _HANDLERS[type(event)](self, event)
        # The clock of `store_patience_s` starts with the first call that is not answered; an answer stops it.
        if self.unanswered is None and any(isinstance(instruction, _REGISTER_CALLS) for instruction in instructions):
            self.unanswered = self.now
        return instructions


def _tick(member: MemberState, event: e.Tick) -> Instructions:
    """Time has passed: every `retry_s` what may have been lost is repeated, by what the member is about."""
    member.now = event.now
    if member.unanswered is not None and member.now - member.unanswered > member.settings.store_patience_s:
        return transitions.store_lost(member, e.StoreLost())
    if member.now - member.asked < member.settings.retry_s:
        return []
    # Forgetting the proposal lets the same one be made again: the compare-and-set of the last one may have been lost.
    member.asked, member.proposal = member.now, None
    return [i.ReadGeneration(), *_REPEAT[member.phase](member)]


_HANDLERS: dict[type, Callable[[MemberState, Any], Instructions]] = {
    # time, and what registers answer
    e.Started: transitions.started,
    e.Tick: _tick,
    e.GenerationRead: transitions.generation_read,
    e.DecisionRead: transitions.decision_read,
    e.GenerationEnded: transitions.generation_ended,
    e.StoreLost: transitions.store_lost,
    # a step
    e.WorkDone: transitions.work_done,
    e.ResultReady: transitions.result_ready,
    e.AckSeen: transitions.ack_seen,
    # who takes part
    e.AttemptFailed: transitions.attempt_failed,
    e.PeerSuspected: transitions.peer_suspected,
    e.DrainWanted: transitions.drain_wanted,
    e.QuotasWanted: transitions.quotas_wanted,
    e.JoinRequested: transitions.join_requested,
    # state changes hands
    e.StateOffered: transitions.state_offered,
    e.StateFetched: transitions.state_fetched,
    e.FetchFailed: transitions.fetch_failed,
    e.NobodyLeft: transitions.nobody_left,
    # the end
    e.StateKept: transitions.state_kept,
    e.EndWanted: transitions.end_wanted,
    e.RanksGone: transitions.ranks_gone,
}

_REPEAT: dict[MemberPhase, Callable[[MemberState], Instructions]] = {
    MemberPhase.OUTSIDE: transitions.ask_to_join,
    MemberPhase.FETCHING: transitions.fetch_again,
    # Own work is repeated by nobody: here only a change of the membership may be due.
    MemberPhase.WORKING: transitions.propose_change,
    MemberPhase.EXCHANGING: transitions.propose_change,
    MemberPhase.VOTING: transitions.vote_again,
    MemberPhase.RESOLVING: transitions.abort_again,
    MemberPhase.FENCING: transitions.close_incarnation,
    MemberPhase.KEEPING: transitions.propose_change,
    MemberPhase.CLOSING: transitions.wait_for_all,
}

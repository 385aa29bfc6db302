"""The machine: every event goes to its handler, and with time whatever was not answered is asked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol import transitions
from ringside.survive.protocol.state import Instructions, MemberPhase, MemberState

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

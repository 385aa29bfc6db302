"""The machine: every event goes to its handler, and with time whatever was not answered is asked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol import transitions
from ringside.survive.protocol.state import Instructions, MemberPhase, MemberState

_ASK = (i.ReadGeneration, i.ProposeGeneration, i.TryCommit, i.TryAbort, i.EndGeneration, i.ReadDecision)


class Member(MemberState):
    """One process of one incarnation; see `MemberState` for its arguments and attributes."""

    def handle(self, event: e.Event) -> Instructions:
        """Take an event; return what is to be done, in order."""
        if self.phase is MemberPhase.ENDED:
            return []
        found = _HANDLERS[type(event)](self, event)
        if self.unanswered is None and any(isinstance(instruction, _ASK) for instruction in found):
            self.unanswered = self.now
        return found


def _tick(member: MemberState, event: e.Tick) -> Instructions:
    """Time has passed."""
    member.now = event.now
    if member.unanswered is not None and member.now - member.unanswered > member.settings.store_patience_s:
        return transitions.store_is_gone(member)
    if member.now - member.asked < member.settings.retry_s:
        return []
    member.asked, member.proposal = member.now, None
    return [i.ReadGeneration(), *_AGAIN[member.phase](member)]


def _resolve_again(member: MemberState) -> Instructions:
    return [*transitions.consider(member), *transitions.abort(member)]


_HANDLERS: dict[type, Callable[[MemberState, Any], Instructions]] = {
    e.Started: transitions.started,
    e.Tick: _tick,
    e.GenerationRead: transitions.generation_read,
    e.NewerHeardOf: transitions.newer_heard_of,
    e.WorkDone: transitions.work_done,
    e.ResultReady: transitions.result_ready,
    e.AckSeen: transitions.ack_seen,
    e.DecisionRead: transitions.decision_read,
    e.GenerationEnded: transitions.fence_on,
    e.StoreLost: transitions.store_lost,
    e.AttemptFailed: transitions.attempt_failed,
    e.PeerSuspected: transitions.peer_suspected,
    e.DrainWanted: transitions.drain_wanted,
    e.QuotasWanted: transitions.quotas_wanted,
    e.JoinRequested: transitions.join_requested,
    e.StateOffered: transitions.state_offered,
    e.StateFetched: transitions.state_fetched,
    e.FetchFailed: transitions.fetch_failed,
    e.NobodyLeft: transitions.nobody_left,
    e.StateKept: transitions.state_kept,
    e.EndWanted: transitions.end_wanted,
    e.RanksGone: transitions.ranks_gone,
}

_AGAIN: dict[MemberPhase, Callable[[MemberState], Instructions]] = {
    MemberPhase.OUTSIDE: transitions.ask_to_join,
    MemberPhase.FETCHING: transitions.fetch_again,
    MemberPhase.WORKING: transitions.consider,
    MemberPhase.EXCHANGING: transitions.consider,
    MemberPhase.VOTING: transitions.vote_again,
    MemberPhase.RESOLVING: _resolve_again,
    MemberPhase.FENCING: transitions.close_again,
    MemberPhase.KEEPING: transitions.consider,
    MemberPhase.CLOSING: transitions.wait_on,
}

__all__ = ["Member"]

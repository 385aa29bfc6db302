"""The machine: every event goes to its handler, and with time whatever was not answered is asked again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol import (
    transitions as deciding,
)
from ringside.survive.protocol import (
    transitions as ending,
)
from ringside.survive.protocol import (
    transitions as entering,
)
from ringside.survive.protocol import (
    transitions as joining,
)
from ringside.survive.protocol import (
    transitions as membership,
)
from ringside.survive.protocol import (
    transitions as voting,
)
from ringside.survive.protocol import (
    transitions as working,
)
from ringside.survive.protocol.state import Instructions, Phase, Standing

_ASK = (i.ReadGeneration, i.ProposeGeneration, i.TryCommit, i.TryAbort, i.EndGeneration, i.ReadDecision)


class Member(Standing):
    """One process of one incarnation; see `Standing` for its arguments and attributes."""

    def handle(self, event: e.Event) -> Instructions:
        """Take an event; return what is to be done, in order."""
        if self.phase is Phase.ENDED:
            return []
        found = _HANDLERS[type(event)](self, event)
        if self.unanswered is None and any(isinstance(instruction, _ASK) for instruction in found):
            self.unanswered = self.now
        return found


def _tick(member: Standing, event: e.Tick) -> Instructions:
    """Time has passed."""
    member.now = event.now
    if member.unanswered is not None and member.now - member.unanswered > member.settings.store_patience_s:
        return ending.store_is_gone(member)
    if member.now - member.asked < member.settings.retry_s:
        return []
    member.asked, member.proposal = member.now, None
    return [i.ReadGeneration(), *_AGAIN[member.phase](member)]


def _resolve_again(member: Standing) -> Instructions:
    return [*membership.consider(member), *entering.abort(member)]


_HANDLERS: dict[type, Callable[[Standing, Any], Instructions]] = {
    e.Started: entering.started,
    e.Tick: _tick,
    e.GenerationRead: entering.generation_read,
    e.NewerHeardOf: entering.newer_heard_of,
    e.WorkDone: working.work_done,
    e.ResultReady: voting.result_ready,
    e.AckSeen: voting.ack_seen,
    e.DecisionRead: deciding.decision_read,
    e.GenerationEnded: ending.fence_on,
    e.StoreLost: ending.store_lost,
    e.AttemptFailed: membership.attempt_failed,
    e.PeerSuspected: membership.peer_suspected,
    e.DrainWanted: membership.drain_wanted,
    e.QuotasWanted: membership.quotas_wanted,
    e.JoinRequested: joining.join_requested,
    e.StateOffered: joining.state_offered,
    e.StateFetched: joining.state_fetched,
    e.FetchFailed: joining.fetch_failed,
    e.NobodyLeft: ending.nobody_left,
    e.StateKept: ending.state_kept,
    e.EndWanted: ending.end_wanted,
    e.RanksGone: ending.ranks_gone,
}

_AGAIN: dict[Phase, Callable[[Standing], Instructions]] = {
    Phase.OUTSIDE: joining.ask_to_join,
    Phase.FETCHING: joining.fetch_again,
    Phase.WORKING: membership.consider,
    Phase.EXCHANGING: membership.consider,
    Phase.VOTING: voting.vote_again,
    Phase.RESOLVING: _resolve_again,
    Phase.FENCING: ending.close_again,
    Phase.KEEPING: membership.consider,
    Phase.CLOSING: ending.wait_on,
}

__all__ = ["Member"]

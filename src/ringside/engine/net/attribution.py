"""Who is to blame when a collective between hosts fails, and the error that says so."""

from __future__ import annotations

from ringside.engine.net.exchange.signature import SignatureMismatch
from ringside.engine.net.rank_map import RankMap
from ringside.engine.transports.base import NOBODY, LinkError, LinkFailure
from ringside.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, SyncError

_RESTART = "restart from the last checkpoint"


def cause_of(error: BaseException, roster: RankMap) -> LinkFailure:
    """Return what this rank tells the others about an error of its own.

    Args:
        error: What was raised; ranks of errors of the shared-memory part are those inside the host.
        roster: Who is where.
    """
    if isinstance(error, LinkError):
        return error.cause
    if isinstance(error, SignatureMismatch):
        return LinkFailure("disagreed", error.peer, _differences(error, roster))
    if isinstance(error, MismatchError):
        return LinkFailure("disagreed", roster.rank, f"on {roster.describe(roster.rank)}: {error}")
    if isinstance(error, PeerLostError | DeadlineError):
        here = roster.hosts[roster.host]
        culprit = here[error.ranks[0]] if error.ranks else roster.rank
        return LinkFailure("lost" if isinstance(error, PeerLostError) else "late", culprit)
    return LinkFailure("left", roster.rank)


def explain(what: str, cause: LinkFailure, error: BaseException, roster: RankMap, timeout_s: float) -> SyncError:
    """Return the error to raise.

    Args:
        what: The collective, in words.
        cause: The first cause that any rank told.
        error: What was raised here.
        roster: Who is where.
        timeout_s: The deadline that was in force, seconds.
    """
    where = f"{what} on {roster.describe(roster.rank)}"
    who, ranks = _who(cause.vertex, roster), [cause.vertex] if cause.vertex != NOBODY else []
    if cause.kind == "disagreed":
        return MismatchError(f"{where}: ranks called different things: {cause.detail} ({who} differs)", ranks)
    if cause.kind == "late":
        text = f"{who} did not send within {timeout_s:g} s, though its connection stands"
        return DeadlineError(f"{where}: {text}; look at what it does, or raise RINGSIDE_TIMEOUT_S", ranks)
    if cause.vertex == roster.rank:
        return error if isinstance(error, SyncError) else ClosedError(f"{where}: {type(error).__name__}: {error}")
    if cause.kind == "left":
        return PeerLostError(f"{where}: {who} gave up; {_RESTART}", ranks)
    return PeerLostError(f"{where}: {who} died or cannot be reached; {_RESTART}", ranks)


def _who(vertex: int, roster: RankMap) -> str:
    if vertex == NOBODY:
        return "another rank"
    return roster.describe(vertex) if vertex < roster.size else "the reducer at the switch"


def _differences(error: SignatureMismatch, roster: RankMap) -> str:
    (seq, plan, segment, call), (own_seq, own_plan, own_segment, own) = error.theirs, error.ours
    peer = _who(error.peer, roster)
    if seq != own_seq:
        return f"{peer} is at collective {seq} on this link, this rank at {own_seq}"
    if call != own:
        return f"{peer} called {call}, this rank {own}"
    if segment != own_segment:
        return f"{peer} cuts messages of {segment} bytes, this rank of {own_segment}"
    return f"{peer} runs another schedule ({plan:08x}) than this rank ({own_plan:08x})"

"""Which rank a collective between hosts failed by, and the error that names it."""

from __future__ import annotations

from ringside.engine.net.exchange.signature import SignatureMismatch
from ringside.engine.net.rank_map import RankMap
from ringside.engine.transports.base import NOBODY, LinkError, LinkFailure
from ringside.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, SyncError
from ringside.text import CLOSED, MISMATCH, timed_out

_RESTART = "restart from the last checkpoint"


def cause_of(error: BaseException, rank_map: RankMap) -> LinkFailure:
    """Return what this rank reports to the others about an error of its own.

    Args:
        error: What was raised; ranks of errors of the shared-memory part are those inside the host.
        rank_map: Which ranks are on which host.
    """
    if isinstance(error, LinkError):
        return error.cause
    if isinstance(error, SignatureMismatch):
        return LinkFailure("disagreed", error.peer, _difference(error, rank_map))
    if isinstance(error, MismatchError):
        return LinkFailure("disagreed", rank_map.rank, f"on {rank_map.describe(rank_map.rank)}: {error}")
    if isinstance(error, PeerLostError | DeadlineError):
        # Raised by the core, which numbers the ranks of this host.
        local_ranks = rank_map.hosts[rank_map.host]
        culprit = local_ranks[error.ranks[0]] if error.ranks else rank_map.rank
        return LinkFailure("lost" if isinstance(error, PeerLostError) else "late", culprit)
    return LinkFailure("left", rank_map.rank)


def explain(label: str, cause: LinkFailure, error: BaseException, rank_map: RankMap, timeout_s: float) -> SyncError:
    """Return the error to raise.

    Args:
        label: The collective, in words.
        cause: The first cause that any rank reported.
        error: What was raised here.
        rank_map: Which ranks are on which host.
        timeout_s: The deadline that was in force, seconds.
    """
    where = f"{label} on {rank_map.describe(rank_map.rank)}"
    culprit, ranks = _name(cause.vertex, rank_map), [cause.vertex] if cause.vertex != NOBODY else []
    if cause.kind == "disagreed":
        return MismatchError(f"{where}: {MISMATCH}: {cause.detail} ({culprit} differs)", ranks)
    if cause.kind == "late":
        text = f"{timed_out(timeout_s)}: {culprit} did not send, though it is still connected"
        return DeadlineError(f"{where}: {text}; look at what it does, or raise RINGSIDE_TIMEOUT_S", ranks)
    # This rank was the first: what it raised itself is what there is to report.
    if cause.vertex == rank_map.rank:
        return error if isinstance(error, SyncError) else ClosedError(f"{where}: {type(error).__name__}: {error}")
    if cause.kind == "left":
        return PeerLostError(f"{where}: {CLOSED}: {culprit} gave up; {_RESTART}", ranks)
    return PeerLostError(f"{where}: {CLOSED}: {culprit} died or cannot be reached; {_RESTART}", ranks)


def _name(vertex: int, rank_map: RankMap) -> str:
    if vertex == NOBODY:
        return "another rank"
    return rank_map.describe(vertex) if vertex < rank_map.size else "the reducer at the switch"


def _difference(error: SignatureMismatch, rank_map: RankMap) -> str:
    # The first difference that explains the others.
    (seq, plan, segment, call), (own_seq, own_plan, own_segment, own) = error.theirs, error.ours
    peer = _name(error.peer, rank_map)
    if seq != own_seq:
        return f"{peer} is at collective {seq} on this link, this rank at {own_seq}"
    if call != own:
        return f"{peer} called {call}, this rank {own}"
    if segment != own_segment:
        return f"{peer} cuts messages of {segment} bytes, this rank of {own_segment}"
    return f"{peer} runs another schedule ({plan:08x}) than this rank ({own_plan:08x})"

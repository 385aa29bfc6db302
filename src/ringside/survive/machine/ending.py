"""How a member comes to an end: after the last step, without a store, or by giving an incarnation up."""

from __future__ import annotations

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.fence import Fence
from ringside.survive.generation import Generation
from ringside.survive.machine.standing import Instructions, Phase, Standing
from ringside.survive.succession import closing


def store_is_gone(member: Standing) -> Instructions:
    """End because the registers do not answer; after the last step nothing is lost by that."""
    if member.phase is Phase.CLOSING:
        return member.end(i.Finish())
    patience = member.settings.store_patience_s
    return member.end(i.Halt(f"the store has not answered for {patience:g} s: start the job again, it resumes"))


def close(member: Standing) -> Instructions:
    """Close the incarnation after its last step; only then is it over for this member."""
    member.phase, record = Phase.CLOSING, member.newest
    assert record is not None
    if record.closed:
        return member.end(i.Finish())
    return [i.ProposeGeneration(record, closing(record, member.is_settled, over=True))]


def nobody_left(member: Standing, _: e.NobodyLeft) -> Instructions:
    """Whoever has state goes on; others give the incarnation up."""
    return give_up(member) if member.step is None else []


def give_up(member: Standing) -> Instructions:
    """Close the incarnation, so that no generation follows; what may still be committed is fenced off then."""
    if member.newest is None:
        return []
    member.enter_phase(Phase.FENCING)
    return close_again(member)


def close_again(member: Standing) -> Instructions:
    """Propose once more that the incarnation be closed; where it is, go on fencing."""
    record = member.newest
    if record is None or member.fence is not None:
        return _fence_again(member)
    return [i.ProposeGeneration(record, closing(record, settled=False, over=False))]


def build_fence(member: Standing, closed: Generation) -> Instructions:
    """Begin to fence off what the closed incarnation could still commit."""
    member.phase, member.fence = Phase.FENCING, Fence.around(closed)
    return _fence_again(member)


def fence_on(member: Standing, event: e.DecisionRead) -> Instructions:
    """A decision stands where an ABORT was tried."""
    if member.fence is None or event.decision is None or event.tag != member.fence.tag:
        return []
    member.fence = member.fence.after(event.decision)
    return _fence_again(member)


def _fence_again(member: Standing) -> Instructions:
    if member.fence is None:
        return []
    if member.fence.done or not member.settings.rules.fence:
        return member.end(i.OpenIncarnation(member.incarnation + 1))
    return [i.TryAbort(member.fence.tag, member.fence.closed.number)]


__all__ = ["build_fence", "close", "close_again", "fence_on", "give_up", "nobody_left", "store_is_gone"]

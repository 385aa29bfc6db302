"""How a member comes to an end: with every rank after the last step, without a store, or by giving an incarnation up.

The end is decided as a step is. Who has applied the last one keeps its state where it outlives the process, and
acknowledges that with the state's digest. The leader lets in whoever is still to come (who died near the end, or was
drained), and once every rank has acknowledged the same digest it writes into the generation register that the job is
over. Only then does any rank go on to what its script does after the loop; a process that is started after that finds
the state where its rank has kept it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.decision import Seat
from ringside.survive.fence import Fence
from ringside.survive.generation import Generation
from ringside.survive.machine.membership import consider
from ringside.survive.machine.standing import Instructions, Phase, Standing
from ringside.survive.succession import closing, ending


def store_lost(member: Standing, _: e.StoreLost) -> Instructions:
    """The registers cannot be reached any more."""
    return store_is_gone(member)


def store_is_gone(member: Standing) -> Instructions:
    """End because the registers do not answer; after the last step nothing is lost by that."""
    if member.phase in (Phase.KEEPING, Phase.CLOSING):
        return member.end(i.Finish("", _without(member)))
    patience = member.settings.store_patience_s
    return member.end(i.Halt(f"the store has not answered for {patience:g} s: start the job again, it resumes"))


def keep(member: Standing) -> Instructions:
    """Keep the final state; whoever was drained shall come for it."""
    tag, record = member.tag, member.generation
    assert tag is not None
    assert record is not None
    member.enter_phase(Phase.KEEPING)
    member.wishes = replace(member.wishes, drains=frozenset(), quotas=(), ends=bool(record.drained))
    return [*consider(member), i.KeepState(tag)]


def state_kept(member: Standing, event: e.StateKept) -> Instructions:
    """The final state is kept: acknowledge it."""
    if event.tag != member.tag or member.phase is not Phase.KEEPING:
        return []
    member.enter_phase(Phase.CLOSING)
    member.own = e.Acknowledgement(event.tag, member.seat, event.digest)
    member.acks = {**member.acks, member.seat: member.own}
    return _tell(member)


def ranks_gone(member: Standing, event: e.RanksGone) -> Instructions:
    """Some ranks do not come any more."""
    member.gone = frozenset(event.ranks)
    return close(member)


def end_wanted(member: Standing, _: e.EndWanted) -> Instructions:
    """This rank wants no further step; if it is at the end already, nothing is to be done."""
    if member.phase in (Phase.KEEPING, Phase.CLOSING):
        return []
    member.wishes = replace(member.wishes, ends=True)
    return consider(member)


def wait_on(member: Standing) -> Instructions:
    """Repeat what may have been lost; let in who has come, and suspect who does not acknowledge for too long."""
    waited, settings = member.now - member.since, member.settings
    patience_s = settings.fetch_patience_s
    if member.is_leader and waited > patience_s:
        member.suspect(*(seat for seat in member.members if not _has_kept(member, seat)))
    elif not member.is_leader and waited > 2 * patience_s + settings.end_patience_s:
        member.suspect(*member.members[:1])
    return [*consider(member, between_steps=True), *_tell(member)]


def _tell(member: Standing) -> Instructions:
    """Tell the leader that the final state is kept; the leader counts instead."""
    if member.own is None or member.generation is None:
        return []
    return close(member) if member.is_leader else [i.PublishAck(member.own, member.generation.leader)]


def close(member: Standing) -> Instructions:
    """End the job, once the leader knows that every rank has kept the same state; only then is it over."""
    record, own = member.generation, member.own
    if member.phase is not Phase.CLOSING or not member.is_leader or not member.is_settled or own is None:
        return []
    assert record is not None
    if not all(_has_kept(member, seat) for seat in record.members) or _awaits(member):
        return []
    said = {seat: ack.digest for seat, ack in member.acks.items() if ack.tag == own.tag}
    if member.settings.rules.equal_digests and len(set(said.values())) > 1:
        return differ(member, said)
    return [i.ProposeGeneration(record, ending(record, own.tag.step, own.digest, member.settings.ranks))]


def differ(member: Standing, said: dict[Seat, str] | dict[Seat, tuple[str, str]]) -> Instructions:
    """Try once more; the second time whoever is not with the majority goes, and comes back with its state."""
    [(usual, votes)] = Counter(said.values()).most_common(1)
    again = not (member.generation and member.generation.attempt and 2 * votes > len(said))
    others = () if again else (seat for seat, result in said.items() if result != usual)
    member.wishes = replace(member.wishes, again=again, suspects=member.wishes.suspects.union(others))
    return consider(member)


def _has_kept(member: Standing, seat: Seat) -> bool:
    ack = member.acks.get(seat)
    return ack is not None and ack.tag == member.tag


def _awaits(member: Standing) -> bool:
    """Tell whether a rank is still to come."""
    patient = member.now - member.since <= member.settings.end_patience_s
    return member.settings.rules.all_come and patient and not set(_without(member)) <= member.gone


def _without(member: Standing) -> tuple[int, ...]:
    """Return the ranks that are not here."""
    here = () if member.generation is None else member.generation.ranks
    return tuple(rank for rank in range(member.settings.ranks) if rank not in here)


def over(member: Standing, record: Generation) -> Instructions:
    """The job is over."""
    return member.end(i.Finish(record.final, record.without))


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
    return [i.ProposeGeneration(record, closing(record, settled=False))]


def build_fence(member: Standing, closed: Generation) -> Instructions:
    """Begin to fence off what the closed incarnation could still commit."""
    member.phase, member.fence = Phase.FENCING, Fence.around(closed)
    return _fence_again(member)


def fence_on(member: Standing, event: e.GenerationEnded) -> Instructions:
    """Nothing is decided in a generation any more."""
    member.unanswered = None
    if member.fence is None or event.number not in member.fence.left:
        return []
    member.fence = member.fence.after(event.number)
    return _fence_again(member)


def _fence_again(member: Standing) -> Instructions:
    if member.fence is None:
        return []
    if member.fence.done or not member.settings.rules.fence:
        return member.end(i.OpenIncarnation(member.incarnation + 1))
    return [i.EndGeneration(member.incarnation, member.fence.left[0], member.fence.closed.number)]


__all__ = [
    "build_fence",
    "close",
    "close_again",
    "differ",
    "end_wanted",
    "fence_on",
    "give_up",
    "keep",
    "nobody_left",
    "over",
    "ranks_gone",
    "state_kept",
    "store_is_gone",
    "store_lost",
    "wait_on",
]

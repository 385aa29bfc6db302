"""Generations follow each other: founding the first one, and going from one into a later one."""

from __future__ import annotations

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.generation import Generation
from ringside.survive.machine.ending import build_fence, over
from ringside.survive.machine.joining import ask_to_join, offer_state
from ringside.survive.machine.membership import consider
from ringside.survive.machine.standing import Instructions, Phase, Standing
from ringside.survive.machine.working import next_step


def started(member: Standing, event: e.Started) -> Instructions:
    """The process is up."""
    member.now, member.step, member.founders = event.now, event.step, event.founders
    return [i.ReadGeneration()]


def newer_heard_of(member: Standing, _: e.NewerHeardOf) -> Instructions:
    """A message named a later generation."""
    return [i.ReadGeneration()]


def generation_read(member: Standing, event: e.GenerationRead) -> Instructions:
    """Something stands in the generation register, or nothing."""
    member.unanswered = None
    record = event.generation
    if record is None:
        return _found(member)
    if member.newest is not None and record.number <= member.newest.number:
        return []
    member.newest, member.proposal, member.wishes = record, None, member.wishes.left_after(record)
    return _superseded(member)


def _found(member: Standing) -> Instructions:
    """Nothing stands in the generation register: make the first one, if this process may."""
    if member.step is None or member.seat not in member.founders:
        return []
    ranks = tuple(seat.rank for seat in member.founders)
    quotas = member.settings.quotas(ranks, member.settings.micro_batches)
    owners = tuple(rank for rank, quota in zip(ranks, quotas, strict=True) for _ in range(quota))
    return [i.ProposeGeneration(None, Generation(member.incarnation, 1, member.step, 0, member.founders, owners))]


def _superseded(member: Standing) -> Instructions:
    """A later generation stands: what is open in the own one is settled first."""
    if member.newest is not None and member.newest.over and member.phase in (Phase.KEEPING, Phase.CLOSING):
        return over(member, member.newest)
    if member.phase is Phase.RESOLVING:
        return []  # first the old one
    if member.generation is None or member.step is None or not member.settings.rules.abort_first:
        return enter(member)
    member.enter_phase(Phase.RESOLVING)
    if not member.settings.rules.keep_copy:
        member.own = None
    return abort(member)


def abort(member: Standing) -> Instructions:
    """Try to win ABORT for the step at hand in the generation in force."""
    tag, record = member.tag, member.newest
    return [] if tag is None or record is None else [i.TryAbort(tag, record.number)]


def enter(member: Standing) -> Instructions:
    """Go into the newest generation: nothing is open in the one before."""
    record, before = member.newest, member.generation
    assert record is not None
    if not member.is_among(record.members):
        return _stay_outside(member, record)
    if before is None and member.step is not None and member.step != record.step:
        reason = f"{member.seat} has state of step {member.step}, not {record.step}"
        return member.end(i.Leave(reason))
    member.generation, member.own, member.offer = record, None, None
    member.acks = {seat: ack for seat, ack in member.acks.items() if seat in record.members}
    gone = () if before is None else tuple(sorted(set(before.members) - set(record.members)))
    settled: Instructions = [i.Settle(record, gone)]
    if member.step is None:
        member.enter_phase(Phase.FETCHING)
        return [*settled, *consider(member)]
    member.phase, member.entered_at = Phase.WORKING, member.step
    return [*settled, *offer_state(member), *next_step(member)]


def _stay_outside(member: Standing, record: Generation) -> Instructions:
    if record.over:
        return over(member, record)
    if member.generation is not None and member.seat.rank in record.drained:
        return member.end(i.Leave("this rank was drained, for it held the others up: it waits until the job ends"))
    if record.closed and member.step is None:
        return build_fence(member, record)
    if member.generation is not None or member.seat in record.left:
        return member.end(i.Leave(f"generation {record.number} goes on without {member.seat}"))
    member.phase, member.step = Phase.OUTSIDE, None  # whoever would have founded the job joins like anybody
    return ask_to_join(member)


__all__ = ["abort", "enter", "generation_read", "newer_heard_of", "started"]

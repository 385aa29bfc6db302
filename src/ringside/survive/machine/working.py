"""A step from its beginning to its exchange."""

from __future__ import annotations

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.machine.ending import keep
from ringside.survive.machine.membership import consider
from ringside.survive.machine.standing import Instructions, Phase, Standing


def next_step(member: Standing, between_steps: bool = False) -> Instructions:
    """Begin the step, or end the job; after a step the leader changes what can wait until then.

    Not when a generation begins: whoever comes and goes again and again would keep the others from every step.
    """
    if member.has_last:
        return keep(member)
    tag, record = member.tag, member.generation
    assert tag is not None
    assert record is not None
    member.enter_phase(Phase.WORKING)
    mine = record.micro_batches_of(member.seat.rank)
    return [*consider(member, between_steps), i.Compute(tag, mine, member.step == member.entered_at)]


def work_done(member: Standing, event: e.WorkDone) -> Instructions:
    """Own micro-batches are computed: all-reduce."""
    if event.tag != member.tag or member.phase is not Phase.WORKING or member.generation is None:
        return []
    member.enter_phase(Phase.EXCHANGING)
    return [i.Exchange(event.tag, member.generation)]


__all__ = ["next_step", "work_done"]

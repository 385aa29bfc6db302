"""A decision stands: COMMIT is applied, ABORT leads on to the next generation."""

from __future__ import annotations

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.decision import Commit
from ringside.survive.machine.entering import abort, enter
from ringside.survive.machine.standing import Instructions, Phase, Standing
from ringside.survive.machine.working import next_step


def decision_read(member: Standing, event: e.DecisionRead) -> Instructions:
    """Something stands in a decision register, or nothing."""
    member.unanswered = None
    if event.decision is None or event.tag != member.tag:
        return []
    taken = member.settings.rules.take_commit or member.phase is not Phase.RESOLVING
    if isinstance(event.decision, Commit) and taken:
        return committed(member, event.decision)
    if member.phase is Phase.RESOLVING:
        member.own = None
        return [i.Discard(event.tag), *enter(member)]
    return [i.ReadGeneration()]  # a later generation stands, or there would be no ABORT


def committed(member: Standing, decision: Commit) -> Instructions:
    """Apply the private copy, and go on: with the next step, or to what stands of it in the old generation."""
    tag, own, rules = member.tag, member.own, member.settings.rules
    assert tag is not None
    assert member.step is not None
    if own is None or own.tag != tag or (rules.equal_digests and own.digest != decision.digest):
        return member.end(i.Leave(f"{tag} is committed, and {member.seat} holds another result"))
    member.step, member.own = member.step + 1, None
    saved = checkpoint(member, member.step) if rules.committed_only else []
    applied: Instructions = [i.Apply(tag, decision), *saved]
    if member.phase is Phase.RESOLVING:
        return [*applied, *abort(member)]
    return [*applied, *next_step(member, between_steps=True)]


def checkpoint(member: Standing, step: int) -> Instructions:
    """Have the state saved, if it is time for it."""
    every = member.settings.checkpoint_every
    return [i.Checkpoint(step)] if every and step % every == 0 else []


__all__ = ["checkpoint", "committed", "decision_read"]

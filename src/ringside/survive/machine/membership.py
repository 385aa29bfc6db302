"""Who takes part: what a member would change, and when it proposes that."""

from __future__ import annotations

from dataclasses import replace

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.generation import Generation
from ringside.survive.machine.standing import Instructions, Phase, Standing
from ringside.survive.succession import successor


def consider(member: Standing, between_steps: bool = False) -> Instructions:
    """Propose another membership, if one is needed and not under way.

    Args:
        member: Who considers.
        between_steps: A step is just done: what can wait until then is changed too, by the leader.
    """
    base = member.newest
    if base is None or member.phase is Phase.FENCING or not member.is_among(base.members):
        return []
    patient = between_steps and member.is_own(base.leader) and member.wishes.patient(base)
    ends = member.wishes.ends and base.last is None and member.is_settled and member.own is None
    if not member.wishes.urgent(base) and not patient and not ends:
        return []
    wanted = successor(base, member.wishes, member.step, member.is_settled, member.settings.quotas)
    trouble = _trouble(member, wanted)
    if trouble:
        return member.end(i.Halt(trouble))
    if wanted == member.proposal:
        return []
    member.proposal = wanted
    return [i.ProposeGeneration(base, wanted)]


def _trouble(member: Standing, wanted: Generation) -> str:
    """Return why a generation must not be; "": it may."""
    least, most = member.settings.least_members, member.settings.most_attempts
    if member.has_last:
        most *= max(member.settings.ranks, 1)  # every rank may come and go: nothing fails by that
    if len(wanted.members) < least:
        return f"{len(wanted.members)} ranks are left and {least} are needed: start the job again, it resumes"
    if wanted.attempt >= most:
        return (
            f"step {wanted.step} was begun {most} times in vain: see the log for exchanges that fail each time; "
            "if there are none, ranks compute different results"
        )
    return ""


def peer_suspected(member: Standing, event: e.PeerSuspected) -> Instructions:
    """A process is dead or silent."""
    member.suspect(event.seat)
    return consider(member)


def attempt_failed(member: Standing, event: e.AttemptFailed) -> Instructions:
    """The exchange cannot be finished: without whom, or around which links, it is to be tried again."""
    if event.tag != member.tag or member.phase is not Phase.EXCHANGING:
        return []
    member.suspect(*event.suspects)
    broken = member.wishes.broken | set(event.broken)
    member.wishes = replace(member.wishes, broken=broken, again=not event.suspects and not event.broken)
    return consider(member)


def drain_wanted(member: Standing, event: e.DrainWanted) -> Instructions:
    """A rank is to wait until the end, once the step is done."""
    member.wishes = replace(member.wishes, drains=member.wishes.drains | {event.rank})
    return []


def quotas_wanted(member: Standing, event: e.QuotasWanted) -> Instructions:
    """Micro-batches are to be shared out otherwise, once the step is done."""
    member.wishes = replace(member.wishes, quotas=event.quotas)
    return []


__all__ = ["attempt_failed", "consider", "drain_wanted", "peer_suspected", "quotas_wanted"]

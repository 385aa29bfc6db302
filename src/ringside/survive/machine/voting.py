"""A result is here: members acknowledge their private copies, and the leader counts."""

from __future__ import annotations

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.decision import Commit, Seat, Tag
from ringside.survive.machine.deciding import checkpoint, committed
from ringside.survive.machine.ending import close, differ
from ringside.survive.machine.membership import consider
from ringside.survive.machine.standing import Instructions, Phase, Standing


def result_ready(member: Standing, event: e.ResultReady) -> Instructions:
    """The private copy is made: acknowledge it."""
    if event.tag != member.tag or member.phase is not Phase.EXCHANGING:
        return []
    member.enter_phase(Phase.VOTING)
    member.own = e.Acknowledgement(event.tag, member.seat, event.digest, event.state)
    member.acks = {**member.acks, member.seat: member.own}
    early = [] if member.settings.rules.committed_only else checkpoint(member, event.tag.step + 1)
    if not member.settings.rules.read_first:
        return committed(member, _commit(member, event.tag, event.digest))
    return [*early, *_publish(member)]


def vote_again(member: Standing) -> Instructions:
    """Repeat what may have been lost; suspect whoever keeps a member with a private copy waiting too long."""
    waited, patience = member.now - member.since, _patience_s(member)
    if member.is_leader and waited > patience:
        member.suspect(*(seat for seat in member.members if not _acknowledged(member, seat)))
    elif not member.is_leader and waited > 2 * patience:
        member.suspect(*member.members[:1])
    return [*consider(member), *_publish(member)]


def _patience_s(member: Standing) -> float:
    fetching = member.generation is not None and member.generation.joining and member.step == member.entered_at
    return member.settings.fetch_patience_s if fetching else member.settings.patience_s


def _publish(member: Standing) -> Instructions:
    """Tell the leader of the private copy, and look for the decision; the leader counts instead."""
    if member.own is None or member.generation is None:
        return []
    if member.is_leader:
        return _count(member)
    return [i.PublishAck(member.own, member.generation.leader), i.ReadDecision(member.own.tag)]


def ack_seen(member: Standing, event: e.AckSeen) -> Instructions:
    """Somebody holds a private copy."""
    ack, newest = event.ack, member.newest
    known = member.acks.get(ack.seat)
    if newest is None or ack.tag.incarnation != member.incarnation or (known and known.tag >= ack.tag):
        return []
    if ack.seat not in (*member.members, *newest.members):
        return []
    member.acks = {**member.acks, ack.seat: ack}
    newer = ack.tag.generation > newest.number
    return [*([i.ReadGeneration()] if newer else []), *_count(member), *close(member)]


def _count(member: Standing) -> Instructions:
    """COMMIT, once the leader knows that every member holds the same private copy."""
    tag, rules = member.tag, member.settings.rules
    if member.phase is not Phase.VOTING or not member.is_leader or tag is None or member.own is None:
        return []
    if rules.every_ack and not all(_acknowledged(member, seat) for seat in member.members):
        return []
    said = {seat: (ack.digest, ack.state) for seat, ack in member.acks.items() if ack.tag == tag}
    if rules.equal_digests and len(set(said.values())) > 1:
        return differ(member, said)
    return [i.TryCommit(tag, _commit(member, tag, member.own.digest))]


def _acknowledged(member: Standing, seat: Seat) -> bool:
    ack = member.acks.get(seat)
    return ack is not None and (ack.tag == member.tag or not member.settings.rules.tagged_acks)


def _commit(member: Standing, tag: Tag, digest: str) -> Commit:
    first, samples = member.settings.samples(tag.step)
    return Commit(member.members, first, samples, samples if member.settings.mean else 1, digest)


__all__ = ["ack_seen", "result_ready", "vote_again"]

"""A process joins: it asks, is offered state, and fetches it; and what members do about it."""

from __future__ import annotations

from dataclasses import replace

from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.machine.ending import give_up
from ringside.survive.machine.membership import consider
from ringside.survive.machine.standing import Instructions, Phase, Standing
from ringside.survive.machine.working import next_step


def ask_to_join(member: Standing) -> Instructions:
    """Ask; a member without state asks for an offer by the same message. Whoever was drained waits for the end."""
    drained = member.newest is not None and member.seat.rank in member.newest.drained
    return [*consider(member), *([] if drained else [i.AskToJoin(member.seat)])]


def fetch_again(member: Standing) -> Instructions:
    """Ask for another offer; where nobody brought state and nobody has offered any, there is none."""
    nobody = member.generation is not None and not member.generation.holders and member.offer is None
    if nobody and member.now - member.since > member.settings.patience_s:
        return give_up(member)
    return ask_to_join(member)


def join_requested(member: Standing, event: e.JoinRequested) -> Instructions:
    """Somebody asks: to be a member, or as a member for state."""
    base = member.newest
    if base is not None and event.seat in base.members:
        return offer_state(member)
    lives = member.wishes.suspects - {event.seat}
    member.wishes = replace(member.wishes, newcomers=member.wishes.newcomers | {event.seat}, suspects=lives)
    return consider(member)


def offer_state(member: Standing) -> Instructions:
    """Offer the state to those who join, as long as it is the one that the generation began with."""
    record, tag = member.generation, member.tag
    if record is None or tag is None or member.step != member.entered_at or member.phase is Phase.RESOLVING:
        return []
    joining = tuple(rank for rank in record.joining if rank != member.seat.rank)
    return [i.OfferState(tag, joining)] if joining else []


def state_offered(member: Standing, event: e.StateOffered) -> Instructions:
    """Take the first offer up that is good in this generation."""
    offer, record = event.offer, member.generation
    if member.phase is not Phase.FETCHING or record is None or member.offer is not None:
        return []
    if offer.tag != record.tag(offer.tag.step) or offer.seat not in record.members:
        return []
    member.offer = offer
    return [i.FetchState(offer.seat, offer.tag, offer.digest)]


def state_fetched(member: Standing, event: e.StateFetched) -> Instructions:
    """The state is here: take part, if it is what was offered."""
    if member.phase is not Phase.FETCHING or member.offer is None or event.tag != member.offer.tag:
        return []
    if event.digest != member.offer.digest and member.settings.rules.verify_state:
        return fetch_failed(member, e.FetchFailed(event.tag))
    member.step = member.entered_at = event.tag.step
    return next_step(member)


def fetch_failed(member: Standing, event: e.FetchFailed) -> Instructions:
    """Let go of the offer: the next tick asks for another."""
    if member.offer is not None and event.tag == member.offer.tag:
        member.offer = None
    return []


__all__ = [
    "ask_to_join",
    "fetch_again",
    "fetch_failed",
    "join_requested",
    "offer_state",
    "state_fetched",
    "state_offered",
]

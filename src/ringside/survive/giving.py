"""Giving the own state away: a packed copy in sealed memory for who can see it, sent to who cannot."""

from __future__ import annotations

from ringside.survive.decision import Seat, Tag
from ringside.survive.memory import Address
from ringside.survive.neighbours import OpenTransport
from ringside.survive.net_state import Gift, gift_name
from ringside.survive.state import Given, State


class Giver:
    """What one member gives to those who join; it stays as it is until they have it.

    Args:
        state: The state; it is copied when the first one asks.
        tag: Names the generation and the step that the state begins.
        seat: Who gives.
        carry: Makes groups between hosts; None: there is one host.
    """

    def __init__(self, state: State, tag: Tag, seat: Seat, carry: OpenTransport | None) -> None:
        self.tag = tag
        self._seat, self._carry, self._given = seat, carry, Given(state)
        self._gifts: dict[Seat, Gift] = {}

    def address_for(self, taker: Seat, here: bool) -> Address | None:
        """Return where a process finds the state; None: it is being sent.

        Args:
            taker: Who joins.
            here: Whether it is on this host.
        """
        if here or self._carry is None:
            return self._given.address
        if taker not in self._gifts:
            self._gifts[taker] = Gift(self._carry, gift_name(self.tag, self._seat, taker), self._given.bytes)
        return None

    def close(self) -> None:
        """Let go of the copy, and of what is under way."""
        for gift in self._gifts.values():
            gift.close()
        self._given.close()


__all__ = ["Giver"]

"""A simulated process's side of its exchanges: part after part, with points in between that faults strike at."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ringside.survive.protocol.decision import Tag
from verification.survive.faults import Phase
from verification.survive.simulated_exchange import Exchange, Part

if TYPE_CHECKING:
    from verification.survive.simulated_process import Process


class Carrier:
    """Carries one exchange after the other.

    Args:
        process: Whose; it is told of the result by `copy_result`.

    Attributes:
        now: The exchange under way; None: there is none.
    """

    def __init__(self, process: Process) -> None:
        self.now: Exchange | None = None
        self._process = process
        self._early: list[Part] = []

    def begin(self, exchange: Exchange) -> None:
        """Begin an exchange; parts of it may have come already."""
        self.now, early = exchange, self._early
        self._early = []
        for bucket in range(len(exchange.buckets)):
            self._send_round(exchange, bucket)
        for part in early:
            self.take(part)
        self._go_on()

    def drop(self) -> None:
        """Leave the exchange under way."""
        self.now = None

    def take(self, part: Part) -> None:
        """Store a part into the exchange that it names; without tags, into any."""
        now, world = self.now, self._process.world
        if now is not None and (part.tag == now.tag or not world.outside.tagged_data):
            world.ledger.stored(now.tag, part.tag)
            now.take(part)
            self._go_on()
        elif now is None or part.tag > now.tag:
            self._early.append(part)

    def waits_for(self, tag: Tag) -> set[int]:
        """Return the ranks that an attempt waits for, if it is under way."""
        now = self.now
        if now is None or now.tag != tag:
            return set()
        return {src for bucket in range(len(now.at)) if (src := now.missing(bucket)) is not None}

    def _go_on(self) -> None:
        """Advance every bucket as far as what has come allows."""
        now, do = self.now, self._process.do
        if now is None:
            return
        for bucket, k in enumerate(now.at):
            if now.advance(bucket):
                do(partial(self._process.reach, Phase.AFTER_RECEIVE, now.tag.step, bucket, k))
                self._send_round(now, bucket)
                do(self._go_on)
        if now.done:
            do(partial(self._end, now))

    def _send_round(self, now: Exchange, bucket: int) -> None:
        do, reach, send = self._process.do, self._process.reach, self._process.send_part
        where = (now.tag.step, bucket, now.at[bucket])
        for first, second in now.sends(bucket):
            do(partial(reach, Phase.BEFORE_SEND, *where))
            do(partial(send, first))
            do(partial(reach, Phase.MID_CHUNK, *where))
            do(partial(send, second))
            do(partial(reach, Phase.AFTER_SEND, *where))

    def _end(self, now: Exchange) -> None:
        if now is self.now:
            self.now = None
            self._process.copy_result(now.tag, list(now.result))


__all__ = ["Carrier"]

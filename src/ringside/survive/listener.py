"""A thread that looks at the store while the worker computes: mail, and the newest generation."""

from __future__ import annotations

import logging
import queue
import threading
import time

from ringside.errors import RingsideError
from ringside.survive.decision import Seat
from ringside.survive.events import AckSeen, Event, GenerationRead, JoinRequested, StateOffered
from ringside.survive.generation import Generation, decode_generation, generation_key
from ringside.survive.meeting import Acknowledged, Joining, Meeting, Offered
from ringside.survive.memory import Address

EVERY_S = 0.05

_log = logging.getLogger("ringside")


class Listener:
    """Turns what comes into events.

    Args:
        meeting: One of its own, over registers that nobody else waits for.
        incarnation: Of which incarnation.
        seat: Whose mail.

    Attributes:
        newest: The newest generation that was seen; None: none.
        addresses: Where the state lies that was offered, by offer.
    """

    def __init__(self, meeting: Meeting, incarnation: int, seat: Seat) -> None:
        self.newest: Generation | None = None
        self.addresses: dict[tuple[str, Seat], Address | None] = {}
        self._meeting, self._incarnation, self._seat = meeting, incarnation, seat
        self._beats: dict[Seat, tuple[int | None, float]] = {}
        self._number = 0
        self._found: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="ringside-survive-listener", daemon=True)
        self._thread.start()

    def events(self) -> list[Event]:
        """Take out what has come."""
        found: list[Event] = []
        while not self._found.empty():
            found.append(self._found.get())
        return found

    def silent_s(self, seat: Seat) -> float:
        """Return for how long a process has not given a sign of life, as far as is known, seconds."""
        _, since = self._beats.setdefault(seat, (None, time.monotonic()))
        return time.monotonic() - since

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        try:
            while not self._end.wait(EVERY_S):
                self._look()
        except RingsideError as error:
            _log.debug("nothing is heard from the store any more: %s", error)  # the worker's own calls say so too

    def _look(self) -> None:
        data = self._meeting.registers.read(generation_key(self._incarnation))
        newest = None if data is None else decode_generation(data)
        if newest is not None and (self.newest is None or newest.number > self.newest.number):
            self.newest = newest
            self._found.put(GenerationRead(newest))
        self._beat()
        for message in self._meeting.receive(self._incarnation, self._seat):
            self._found.put(self._event(message))

    def _beat(self) -> None:
        """Give a sign of life, and look for those that were asked after."""
        self._number += 1
        self._meeting.beat(self._incarnation, self._seat, self._number)
        for seat, (known, _) in list(self._beats.items()):
            latest = self._meeting.beat_of(self._incarnation, seat)
            if latest != known:
                self._beats[seat] = latest, time.monotonic()

    def _event(self, message: Joining | Offered | Acknowledged) -> Event:
        if isinstance(message, Joining):
            return JoinRequested(message.seat)
        if isinstance(message, Acknowledged):
            return AckSeen(message.ack)
        self.addresses[str(message.offer.tag), message.offer.seat] = message.address
        return StateOffered(message.offer)

"""A thread that looks at the store while the worker computes: mail, and the newest generation."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from ringside.errors import RingsideError
from ringside.survive.cluster.rendezvous import Acknowledged, Joining, Knock, Offered, Rendezvous
from ringside.survive.cluster.shared_memory import Address
from ringside.survive.protocol.decision import MemberId
from ringside.survive.protocol.events import AckSeen, Event, GenerationRead, JoinRequested, StateOffered
from ringside.survive.protocol.generation import Generation, decode_generation, generation_key

EVERY_S = 0.05
MOST_S = 0.25
"""What a look that comes late counts for: a process that got no processor time has not heard the others' silence."""

_log = logging.getLogger("ringside")


class WorkerListener:
    """Turns what comes into events.

    Args:
        meeting: One of its own, over registers that nobody else waits for.
        incarnation: Of which incarnation.
        seat: Whose mail.
        answer: Called with every knock; it must not wait.
        clock: Seconds.

    Attributes:
        newest: The newest generation that was seen; None: none.
        addresses: Where the state lies that was offered, by offer.
        unreached: The members that a process which asks to join gets no connection to.
    """

    def __init__(
        self,
        meeting: Rendezvous,
        incarnation: int,
        seat: MemberId,
        answer: Callable[[Knock], object] = id,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.newest: Generation | None = None
        self.addresses: dict[tuple[str, MemberId], Address | None] = {}
        self.unreached: dict[MemberId, tuple[MemberId, ...]] = {}
        self._meeting, self._incarnation, self._seat, self._answer = meeting, incarnation, seat, answer
        self._beats: dict[MemberId, tuple[int | None, float]] = {}
        self._number, self._listened_s, self._looked = 0, 0.0, clock()
        self._clock = clock
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

    def silent_s(self, seat: MemberId) -> float:
        """Return for how long a process has not given a sign of life though one was listened for, seconds."""
        _, since_s = self._beats.setdefault(seat, (None, self._listened_s))
        return self._listened_s - since_s

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join(timeout=1.0)

    def _listen(self) -> None:
        try:
            while not self._end.wait(EVERY_S):
                self.look()
        except RingsideError as error:
            _log.debug("nothing is heard from the store any more: %s", error)  # the worker's own calls say so too

    def look(self) -> None:
        """Look once at what the others say."""
        data = self._meeting.registers.read(generation_key(self._incarnation))
        newest = None if data is None else decode_generation(data)
        if newest is not None and (self.newest is None or newest.number > self.newest.number):
            self.newest = newest
            self._found.put(GenerationRead(newest))
        self._beat()
        for message in self._meeting.receive(self._incarnation, self._seat):
            if isinstance(message, Knock):
                self._answer(message)
            else:
                self._found.put(self._event(message))

    def _beat(self) -> None:
        """Give a sign of life, and look for those that were asked after."""
        self._number += 1
        now = self._clock()
        self._listened_s, self._looked = self._listened_s + min(now - self._looked, MOST_S), now
        self._meeting.beat(self._incarnation, self._seat, self._number)
        for seat, (known, _) in list(self._beats.items()):
            latest = self._meeting.beat_of(self._incarnation, seat)
            if latest != known:
                self._beats[seat] = latest, self._listened_s

    def _event(self, message: Joining | Offered | Acknowledged) -> Event:
        if isinstance(message, Joining):
            self.unreached[message.seat] = message.unreached
            return JoinRequested(message.seat)
        if isinstance(message, Acknowledged):
            return AckSeen(message.ack)
        self.addresses[str(message.offer.tag), message.offer.seat] = message.address
        return StateOffered(message.offer)

"""A thread that polls the store while the worker computes: mail, signs of life, and the newest generation."""

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
"""What a poll that comes late counts for: a process that got no processor time has not heard the others' silence."""

_log = logging.getLogger("ringside")


class WorkerListener:
    """Turns what comes into events.

    Args:
        rendezvous: One of its own, over registers that nobody else waits for.
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
        rendezvous: Rendezvous,
        incarnation: int,
        seat: MemberId,
        answer: Callable[[Knock], object] = id,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.newest: Generation | None = None
        self.addresses: dict[tuple[str, MemberId], Address | None] = {}
        self.unreached: dict[MemberId, tuple[MemberId, ...]] = {}
        self._rendezvous, self._incarnation, self._seat, self._answer = rendezvous, incarnation, seat, answer
        self._beats: dict[MemberId, tuple[int | None, float]] = {}
        self._number, self._listened_s, self._polled = 0, 0.0, clock()
        self._clock = clock
        self._found: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ringside-survive-listener", daemon=True)
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

    def _run(self) -> None:
        try:
            while not self._end.wait(EVERY_S):
                self.poll()
        except RingsideError as error:
            _log.debug("nothing is heard from the store any more: %s", error)  # the worker's own calls say so too

    def poll(self) -> None:
        """Read once what the others have written: generations, signs of life, messages."""
        data = self._rendezvous.registers.read(generation_key(self._incarnation))
        newest = None if data is None else decode_generation(data)
        if newest is not None and (self.newest is None or newest.number > self.newest.number):
            self.newest = newest
            self._found.put(GenerationRead(newest))

        # A sign of life of this process, then those of the processes that `silent_s` was asked about. Silence is
        # measured in time that was listened, so that a pause of this process is not taken for the others'.
        self._number += 1
        now = self._clock()
        self._listened_s, self._polled = self._listened_s + min(now - self._polled, MOST_S), now
        self._rendezvous.beat(self._incarnation, self._seat, self._number)
        for seat, (known, _) in list(self._beats.items()):
            latest = self._rendezvous.beat_of(self._incarnation, seat)
            if latest != known:
                self._beats[seat] = latest, self._listened_s

        for message in self._rendezvous.receive(self._incarnation, self._seat):
            match message:
                case Knock():
                    self._answer(message)
                case Joining(seat, unreached):
                    self.unreached[seat] = unreached
                    self._found.put(JoinRequested(seat))
                case Acknowledged(ack):
                    self._found.put(AckSeen(ack))
                case Offered(offer, address):
                    self.addresses[str(offer.tag), offer.seat] = address
                    self._found.put(StateOffered(offer))

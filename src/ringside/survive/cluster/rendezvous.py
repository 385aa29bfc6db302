"""Where the workers of a job find each other: names in the store, mail, and the thread that reads it.

Everything is a register (`registers.py`), so nothing is lost when a worker dies between two calls, and a job that has
to begin again finds what stands.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from ringside.errors import RingsideError
from ringside.survive.cluster.peers import PeerPlace
from ringside.survive.cluster.registers import Registers
from ringside.survive.cluster.shared_memory import Address
from ringside.survive.protocol.decision import MemberId, T, decode, encode
from ringside.survive.protocol.events import Event, GenerationRead, JoinRequested, RankOffered, StateOffered
from ringside.survive.protocol.generation import Generation, decode_generation, generation_key

_INCARNATION = "incarnation"
_LOOK_S = 0.02


class Joining(msgspec.Struct, frozen=True, tag="join"):
    """A message: a process wants to be a member.

    Args:
        seat: Which.
        unreached: Members that it gets no connection to.
    """

    seat: MemberId
    unreached: tuple[MemberId, ...] = ()


class Offered(msgspec.Struct, frozen=True, tag="offer"):
    """A message: state that may be fetched, and where it lies.

    Args:
        offer: The offer.
        address: Where; None: on another host, it is sent.
    """

    offer: RankOffered
    address: Address | None


class Knock(msgspec.Struct, frozen=True, tag="knock"):
    """A message: a process wants to know whether it can reach who reads this; see `links.py`.

    Args:
        seat: Which.
        number: How often it has knocked.
    """

    seat: MemberId
    number: int


Message = Joining | Offered | Knock


class Rendezvous:
    """A job's names in the store.

    Args:
        registers: The job's own.
        ranks: How many ranks the job was started with.
    """

    def __init__(self, registers: Registers, ranks: int) -> None:
        self.registers, self.ranks = registers, ranks
        self._sent: dict[str, int] = {}
        self._published: dict[str, bytes] = {}
        self._read: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------ incarnations and seats

    def incarnation(self) -> int:
        """Return the newest incarnation, from 1."""
        return self._number(_INCARNATION) or 1

    def open(self, incarnation: int) -> int:
        """Go on to an incarnation, unless there is a newer one already; return the newest."""
        while True:
            stands = self._number(_INCARNATION)
            if (stands or 1) >= incarnation:
                return stands or 1
            self.registers.swap(_INCARNATION, None if stands is None else encode(stands), encode(incarnation))

    def claim(self, incarnation: int, rank: int, place: PeerPlace) -> MemberId:
        """Claim a rank's next epoch, and publish where its process runs."""
        epoch = 1
        while True:
            seat = MemberId(rank, epoch)
            if self.registers.create(_key(incarnation, "place", seat), encode(place)) == encode(place):
                return seat
            epoch += 1

    def place(self, incarnation: int, seat: MemberId) -> PeerPlace | None:
        """Return where a process runs."""
        return self._read_as(PeerPlace, _key(incarnation, "place", seat), "a worker's place")

    def founders(self, incarnation: int, patience_s: float, alive: Callable[[MemberId], bool]) -> tuple[MemberId, ...]:
        """Return who begins an incarnation: the living process of every rank, once all have come that were not refused.

        Args:
            incarnation: Which.
            patience_s: How long to wait for all ranks, seconds; then those who came begin.
            alive: Tells whether a process may still live.
        """
        key, deadline = f"{incarnation}/founders", time.monotonic() + patience_s
        while True:
            founders = self._read_as(tuple[MemberId, ...], key, "the list of founders")
            if founders is not None:
                return founders
            newest = (self.newest(incarnation, rank) for rank in range(self.ranks))
            present = tuple(seat for seat in newest if seat is not None and alive(seat))
            # A rank that was refused does not come: it is not waited for.
            settled = {seat.rank for seat in present}.union(filter(self.refused, range(self.ranks)))
            if present and (len(settled) == self.ranks or time.monotonic() > deadline):
                self.registers.create(key, encode(present))  # the first list that is written counts, for all
            else:
                time.sleep(_LOOK_S)  # a store has nothing to wait on for a process that has not come

    def newest(self, incarnation: int, rank: int) -> MemberId | None:
        """Return a rank's last process; None: it never had one."""
        seat = MemberId(rank, 0)
        while self.registers.read(_key(incarnation, "place", MemberId(rank, seat.epoch + 1))) is not None:
            seat = MemberId(rank, seat.epoch + 1)
        return seat if seat.epoch else None

    def refuse(self, rank: int, place: PeerPlace) -> None:
        """Publish that a process of a rank is no member of this job and does not come again."""
        self.publish(f"refused/{rank}", encode(place))

    def refused(self, rank: int) -> PeerPlace | None:
        """Return where a process of a rank ran that is no member of this job; None: there was none."""
        return self._read_as(PeerPlace, f"refused/{rank}", "a worker's place")

    def publish_final(self, where: str) -> None:
        """Publish where the final state lies, for ranks that cannot have it."""
        self.publish("final", where.encode())

    def final(self) -> str:
        """Return where the final state lies; "": nobody has said so."""
        return (self.registers.read("final") or b"").decode(errors="replace")

    # ------------------------------------------------------------------------------------------ what members show

    def publish_arena(self, incarnation: int, generation: int, seat: MemberId, address: Address) -> None:
        """Publish where a member's arena of a generation lies."""
        self.registers.create(_key(incarnation, f"arena/{generation}", seat), encode(address))

    def arena_of(self, incarnation: int, generation: int, seat: MemberId) -> Address | None:
        """Return where a member's arena lies; None: it has not said so yet."""
        return self._read_as(Address, _key(incarnation, f"arena/{generation}", seat), "the address of an arena")

    def publish(self, key: str, value: bytes) -> None:
        """Have a register that only this process writes hold a value."""
        # Usually what stands is what was written last; else another process of this rank has written, and is over.
        stands = self.registers.swap(key, self._published.get(key), value)
        if stands is not None and stands != value:
            self.registers.swap(key, stands, value)
        self._published[key] = value

    def beat(self, incarnation: int, seat: MemberId, number: int) -> None:
        """Give a sign of life."""
        self.publish(_key(incarnation, "beat", seat), encode(number))

    def beat_of(self, incarnation: int, seat: MemberId) -> int | None:
        """Return a process's latest sign of life; None: it has given none."""
        return self._number(_key(incarnation, "beat", seat))

    # ------------------------------------------------------------------------------------------ mail

    def send(self, incarnation: int, to: MemberId, message: Message) -> None:
        """Put a message into a process's box; messages of one sender arrive in order."""
        box, data = _key(incarnation, "mail", to), encode(message)
        number = self._sent.get(box, 0)
        # Every message has a register of its own; senders race for the next free one.
        while self.registers.create(f"{box}/{number}", data) != data:
            number += 1
        self._sent[box] = number + 1

    def receive(self, incarnation: int, seat: MemberId) -> Sequence[Message]:
        """Take the messages out that have come since the last time; what cannot be read is passed over."""
        box = _key(incarnation, "mail", seat)
        found: list[Message] = []
        while True:
            number = self._read.get(box, 0)
            data = self.registers.read(f"{box}/{number}")
            if data is None:
                return found
            self._read[box] = number + 1
            try:
                found.append(decode(data, Message, "a message"))  # type: ignore[arg-type]
            except RingsideError:
                continue

    def _number(self, key: str) -> int | None:
        return self._read_as(int, key, "a number")

    def _read_as(self, kind: type[T], key: str, name: str) -> T | None:
        data = self.registers.read(key)
        return None if data is None else decode(data, kind, name)


def _key(incarnation: int, kind: str, seat: MemberId) -> str:
    return f"{incarnation}/{kind}/{seat.rank}/{seat.epoch}"


EVERY_S = 0.05
MOST_S = 0.25
"""What a poll that comes late counts for: a process that got no processor time has not heard the others' silence."""

_log = logging.getLogger(__name__)


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
        return [self._found.get() for _ in range(self._found.qsize())]

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
            _log.debug("the store does not answer any more: %s", error)  # the worker's own calls say so too

    def poll(self) -> None:
        """Read once what the others have written: generations, signs of life, messages."""
        newest = decode_generation(self._rendezvous.registers.read(generation_key(self._incarnation)))
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
                case Offered(offer, address):
                    self.addresses[str(offer.tag), offer.seat] = address
                    self._found.put(StateOffered(offer))

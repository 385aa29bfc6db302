"""Where the workers of a job find each other: names in the store, and mail between workers.

Everything is a register (`registers.py`), so nothing is lost when a worker dies between two calls, and a job that has
to begin again finds what stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec

from ringside.errors import RingsideError
from ringside.survive.cluster.peers import PeerPlace
from ringside.survive.cluster.registers import Registers
from ringside.survive.cluster.shared_memory import Address
from ringside.survive.protocol.decision import MemberId, decode, encode
from ringside.survive.protocol.events import Acknowledgement, RankOffered

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
    """A message: a process wants to know whether it can reach who reads this; see `reachability.py`.

    Args:
        seat: Which.
        number: How often it has knocked.
    """

    seat: MemberId
    number: int


class Acknowledged(msgspec.Struct, frozen=True, tag="ack"):
    """A message: an acknowledgement.

    Args:
        ack: The acknowledgement.
    """

    ack: Acknowledgement


Message = Joining | Offered | Acknowledged | Knock
_messages = msgspec.msgpack.Decoder(Message)
_places = msgspec.msgpack.Decoder(PeerPlace)
_seats = msgspec.msgpack.Decoder(tuple[MemberId, ...])
_numbers = msgspec.msgpack.Decoder(int)
_addresses = msgspec.msgpack.Decoder(Address)


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
            if self.registers.create(_place_key(incarnation, seat), encode(place)) == encode(place):
                return seat
            epoch += 1

    def place(self, incarnation: int, seat: MemberId) -> PeerPlace | None:
        """Return where a process runs."""
        data = self.registers.read(_place_key(incarnation, seat))
        return None if data is None else decode(data, _places, "a worker's place")

    def founders(self, incarnation: int, patience_s: float, alive: Callable[[MemberId], bool]) -> tuple[MemberId, ...]:
        """Return who begins an incarnation: the living process of every rank, once all have come that were not refused.

        Args:
            incarnation: Which.
            patience_s: How long to wait for all ranks, seconds; then those who came begin.
            alive: Tells whether a process may still live.
        """
        key, deadline = f"{incarnation}/founders", time.monotonic() + patience_s
        while True:
            stands = self.registers.read(key)
            if stands is not None:
                return decode(stands, _seats, "the list of founders")
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
        while self.registers.read(_place_key(incarnation, MemberId(rank, seat.epoch + 1))) is not None:
            seat = MemberId(rank, seat.epoch + 1)
        return seat if seat.epoch else None

    def refuse(self, rank: int, place: PeerPlace) -> None:
        """Publish that a process of a rank is no member of this job and does not come again."""
        self.publish(f"refused/{rank}", encode(place))

    def refused(self, rank: int) -> PeerPlace | None:
        """Return where a process of a rank ran that is no member of this job; None: there was none."""
        data = self.registers.read(f"refused/{rank}")
        return None if data is None else decode(data, _places, "a worker's place")

    def publish_final(self, where: str) -> None:
        """Publish where the final state lies, for ranks that cannot have it."""
        self.publish("final", where.encode())

    def final(self) -> str:
        """Return where the final state lies; "": nobody has said so."""
        return (self.registers.read("final") or b"").decode(errors="replace")

    # ------------------------------------------------------------------------------------------ what members show

    def publish_arena(self, incarnation: int, generation: int, seat: MemberId, address: Address) -> None:
        """Publish where a member's arena of a generation lies."""
        self.registers.create(_arena_key(incarnation, generation, seat), encode(address))

    def arena_of(self, incarnation: int, generation: int, seat: MemberId) -> Address | None:
        """Return where a member's arena lies; None: it has not said so yet."""
        data = self.registers.read(_arena_key(incarnation, generation, seat))
        return None if data is None else decode(data, _addresses, "the address of an arena")

    def publish(self, key: str, value: bytes) -> None:
        """Have a register that only this process writes hold a value."""
        # Usually what stands is what was written last; else another process of this rank has written, and is over.
        stands = self.registers.swap(key, self._published.get(key), value)
        if stands is not None and stands != value:
            self.registers.swap(key, stands, value)
        self._published[key] = value

    def beat(self, incarnation: int, seat: MemberId, number: int) -> None:
        """Give a sign of life."""
        self.publish(_beat_key(incarnation, seat), encode(number))

    def beat_of(self, incarnation: int, seat: MemberId) -> int | None:
        """Return a process's latest sign of life; None: it has given none."""
        return self._number(_beat_key(incarnation, seat))

    # ------------------------------------------------------------------------------------------ mail

    def send(self, incarnation: int, to: MemberId, message: Message) -> None:
        """Put a message into a process's box; messages of one sender arrive in order."""
        box, data = _box(incarnation, to), encode(message)
        number = self._sent.get(box, 0)
        # Every message has a register of its own; senders race for the next free one.
        while self.registers.create(f"{box}/{number}", data) != data:
            number += 1
        self._sent[box] = number + 1

    def receive(self, incarnation: int, seat: MemberId) -> Sequence[Message]:
        """Take the messages out that have come since the last time; what cannot be read is passed over."""
        box = _box(incarnation, seat)
        found: list[Message] = []
        while True:
            number = self._read.get(box, 0)
            data = self.registers.read(f"{box}/{number}")
            if data is None:
                return found
            self._read[box] = number + 1
            try:
                found.append(decode(data, _messages, "a message"))
            except RingsideError:
                continue

    def _number(self, key: str) -> int | None:
        data = self.registers.read(key)
        return None if data is None else decode(data, _numbers, "a number")


def _place_key(incarnation: int, seat: MemberId) -> str:
    return f"{incarnation}/place/{seat.rank}/{seat.epoch}"


def _arena_key(incarnation: int, generation: int, seat: MemberId) -> str:
    return f"{incarnation}/arena/{generation}/{seat.rank}/{seat.epoch}"


def _beat_key(incarnation: int, seat: MemberId) -> str:
    return f"{incarnation}/beat/{seat.rank}/{seat.epoch}"


def _box(incarnation: int, seat: MemberId) -> str:
    return f"{incarnation}/mail/{seat.rank}/{seat.epoch}"


__all__ = ["Acknowledged", "Joining", "Knock", "Message", "Offered", "Rendezvous"]

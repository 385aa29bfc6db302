"""State is transferred: a member offers it to ranks that join, and a joiner loads it, checked by its digest.

On one host the joiner maps a sealed copy of the owner's. Between hosts a thread of the owner sends it over a group of
two that only this transfer uses (`StateSender`, `receive`). `StateTransfer` is one worker's part.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Event

import numpy as np

from ringside.engine.runtime.worker import Work, Worker
from ringside.engine.transports.base import Bytes, LinkError, LinkFailure, Transport
from ringside.errors import MismatchError, RingsideError
from ringside.survive.cluster.known_workers import KnownWorkers
from ringside.survive.cluster.links import OpenTransport
from ringside.survive.cluster.peers import PeerWait, Superseded
from ringside.survive.cluster.rendezvous import Offered
from ringside.survive.cluster.shared_memory import Address, OwnArena, read_only
from ringside.survive.job import SurviveJob
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import MemberId, Tag
from ringside.survive.protocol.generation import Generation
from ringside.survive.state.state import digest_of, pack, packed_size, unpack

# -------------------------------------------------------------------------------------------------
# To a process on another host: its size (int64), then the bytes in pieces, over a group of two.

PIECE_BYTES = 1 << 22
MOST_BYTES = 1 << 44
"""A size that is announced as more is none: the other end is no worker of ours."""
_GIVER, _TAKER = 0, 1


class StateSender:
    """A state on its way: a thread sends it.

    Args:
        open_transport: Makes the group.
        name: The transfer's, see `transfer_name`.
        memory: The state, uint8 [n]; it must not change.
    """

    def __init__(self, open_transport: OpenTransport, name: str, memory: Bytes) -> None:
        self._thread = Worker("ringside-survive-gift")
        self._transport: Transport | None = None
        self._wanted = True

        def send() -> None:
            self._transport = transport = open_transport(name, _GIVER, lambda: self._wanted)
            length = np.array([len(memory)], dtype=np.int64).view(np.uint8)
            for piece in (length, *_pieces(memory)):
                transport.send(_TAKER, piece).wait()

        self._work = self._thread.submit(send)

    def close(self) -> None:
        """Abort the transfer, if it has not arrived."""
        self._wanted = False
        if self._transport is not None:
            self._transport.fail(LinkFailure("left", _GIVER))
            self._transport.close(patience_s=0.0)
        self._thread.stop(timeout_s=0.0)


def receive(open_transport: OpenTransport, name: str, wait: Callable[[Work], object]) -> Bytes:
    """Receive a state, uint8 [n].

    Args:
        open_transport: Makes the group.
        name: The transfer's.
        wait: Returns when work is done, or raises to abort.

    Raises:
        RingsideError: It did not arrive.
    """
    thread, opened, over = Worker("ringside-survive-gift"), list[Transport](), Event()

    def receive_all() -> Bytes:
        transport = open_transport(name, _TAKER, lambda: not over.is_set())
        opened.append(transport)
        length = np.zeros(8, dtype=np.uint8)
        transport.receive(_GIVER, length).wait()
        size = int(length.view(np.int64)[0])
        if not 0 < size < MOST_BYTES:
            raise RingsideError(f"a state of {size} bytes was announced")
        memory = np.empty(size, dtype=np.uint8)
        for piece in _pieces(memory):
            transport.receive(_GIVER, piece).wait()
        return memory

    try:
        work = thread.submit(receive_all)
        wait(work)
        received: Bytes = work.result()
        return received
    except (LinkError, RuntimeError) as error:
        raise RingsideError(f"the connection broke ({error})") from None
    finally:
        over.set()
        for transport in opened:
            transport.fail(LinkFailure("left", _TAKER))
            transport.close(patience_s=0.0)
        thread.stop(timeout_s=0.0)


def transfer_name(tag: Tag, giver: MemberId, taker: MemberId) -> str:
    """Return the name of a transfer, in the store: no two have one name."""
    return f"{tag.incarnation}/gift/{tag.generation}/{giver.rank}.{giver.epoch}/{taker.rank}.{taker.epoch}"


def _pieces(memory: Bytes) -> list[Bytes]:
    bounds = [*range(0, len(memory), PIECE_BYTES), len(memory)]
    return [memory[first:last] for first, last in itertools.pairwise(bounds)]


Addresses = Mapping[tuple[str, MemberId], Address | None]
"""(tag as a string, who offers) → where the state lies; None: its owner sends it."""

_log = logging.getLogger(__name__)


class StateTransfer:
    """One worker's part: what it offers, and what it receives.

    Args:
        job: Whose state.

    Attributes:
        unreached: Members whose state could not be fetched.
    """

    def __init__(self, job: SurviveJob) -> None:
        self._job = job
        self.unreached: set[MemberId] = set()
        # What is offered: the state in sealed memory, which stays as it is until those who join have it.
        self._tag: Tag | None = None
        self._copy: OwnArena | None = None
        self._senders: dict[MemberId, StateSender] = {}

    def offer(self, tag: Tag, seat: MemberId, takers: Sequence[MemberId], known: KnownWorkers) -> None:
        """Let some joiners know where they find the state; what is offered stays as it is until it is withdrawn.

        Args:
            tag: The attempt that the state begins.
            seat: Who offers.
            takers: Who joins.
            known: Whom this worker knows.
        """
        job = self._job
        if self._copy is None or self._tag != tag:
            self.withdraw()
            tree = job.state.tree()
            self._tag, self._copy = tag, OwnArena(packed_size(tree))
            pack(tree, self._copy.bytes)
        message = e.RankOffered(tag, seat, f"{job.state.digest():016x}")
        for taker in takers:
            address: Address | None = self._copy.address
            if job.open_transport is not None and not known.peer(taker).here:
                address = None  # it is sent
                if taker not in self._senders:
                    name = transfer_name(tag, seat, taker)
                    self._senders[taker] = StateSender(job.open_transport, name, self._copy.bytes)
            job.rendezvous.send(tag.incarnation, taker, Offered(message, address))

    def withdraw(self) -> None:
        """Close what was offered."""
        for sender in self._senders.values():
            sender.close()
        if self._copy is not None:
            self._copy.close()
        self._copy, self._senders = None, {}

    def receive(
        self, fetch: i.FetchState, seat: MemberId, addresses: Addresses, peer_wait: PeerWait | None
    ) -> e.Event | None:
        """Load the state that was offered; return what has become of it, None: it is not wanted any more.

        Args:
            fetch: Which.
            seat: Who takes it.
            addresses: Where states lie, by offer.
            peer_wait: Waits for the owner meanwhile.
        """
        open_transport = self._job.open_transport
        try:
            # From the owner's memory, or sent by it.
            address = addresses[str(fetch.tag), fetch.source]
            if address is not None:
                packed = read_only(address)
            elif open_transport is not None and peer_wait is not None:
                name, waits = transfer_name(fetch.tag, fetch.source, seat), peer_wait.wait
                packed = receive(
                    open_transport, name, lambda work: waits(lambda: [] if work.is_completed() else [fetch.source])
                )
            else:
                raise RingsideError("there is no connection between hosts")
            tree = unpack(packed)
            if digest_of(tree) != int(fetch.digest, 16):
                raise MismatchError("the state that was given is not the one that all agreed on")
            self._job.state.load(tree)
        except Superseded:
            return None
        except (RingsideError, KeyError) as error:
            self.unreached.add(fetch.source)
            _log.warning("the state of %s cannot be fetched (%s): it is asked for again", fetch.source, error)
            return e.FetchFailed(fetch.tag)
        return e.StateFetched(fetch.tag, f"{self._job.state.digest():016x}")


def choose_giver(taker: MemberId, record: Generation, unreached: Collection[MemberId]) -> MemberId:
    """Return the member that gives a joiner the state: the first that brought it, or joins too, and can be reached.

    Args:
        taker: Who joins.
        record: The generation that it joins.
        unreached: The members that it gets no connection to.
    """
    others = (seat for seat in record.members if seat not in record.holders and seat != taker)
    choice = (*record.holders, *others)
    return next((seat for seat in choice if seat not in unreached), choice[0])

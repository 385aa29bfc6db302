"""How the ranks of one host find each other and hand file descriptors around.

Rank 0 listens on a Unix socket in a directory that only its user can enter, and on an abstract one for ranks that see
another /tmp; the others connect (`meeting_place.py`). Both ends check each other's user, so another user who holds the
name neither serves nor stops the job. Rank 0 opens a pidfd for each peer and sends all of them to every rank, so that
a death is reported by the kernel and not by a timeout (and across PID namespaces). Afterwards the same sockets serve
`exchange`: every rank gives some bytes and descriptors and gets those of all ranks.

Messages are length-prefixed MessagePack. Descriptors travel by SCM_RIGHTS and are close-on-exec on arrival.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.engine.shm.meeting_place import connect, credentials, listening
from ringside.errors import DeadlineError, MismatchError, PeerLostError, RingsideError, UnsupportedError, UsageError
from ringside.text import CLOSED, name_ranks

PROTOCOL = 2
_MAX_MESSAGE = 1 << 24
_FDS_PER_MESSAGE = 200  # the kernel's limit is 253
_FD_BYTES = struct.calcsize("i")
DEATH_GRACE_S = 0.25
GRACE_S = 1.0  # how much longer ranks wait for rank 0 than rank 0 waits for them: it knows who is missing
_REFUSAL_S = 2.0  # how long rank 0 still waits for others once it knows that a rank does not fit


@dataclass(frozen=True)
class Parcel:
    """What one rank gave to an exchange: a value made of plain types, and file descriptors the receiver now owns."""

    value: Any
    fds: tuple[int, ...] = ()


@dataclass
class Hub:
    """The sockets between rank 0 and the others, and a pidfd for every peer.

    Args:
        rank: This rank.
        ranks: Number of ranks.
        sockets: On rank 0 one per other rank (by rank), elsewhere only the one to rank 0.
        pidfds: By rank; -1 for this rank itself.
        lent: The pidfds are the core's, which closes them.
    """

    rank: int
    ranks: int
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    pidfds: list[int] = field(default_factory=list)
    lent: bool = False
    _open: list[bool] = field(default_factory=lambda: [True], repr=False, compare=False)

    def exchange(self, value: Any, fds: Sequence[int] = (), *, timeout_s: float) -> list[Parcel]:
        """Give a value and descriptors to every rank and return what each rank gave, by rank.

        Every rank must call this in the same order. Errors: `PeerLostError`, `DeadlineError`.
        """
        deadline = time.monotonic() + timeout_s
        parcels: list[Parcel] = []
        try:
            if self.rank == 0:  # gather, then send everything to everybody
                parcels.append(_own_parcel(value, fds))
                for peer in range(1, self.ranks):
                    parcels.append(self._receive(peer, deadline))
                for peer in range(1, self.ranks):
                    for parcel in parcels:
                        self._send(peer, parcel.value, parcel.fds, deadline)
            else:
                self._send(0, value, fds, deadline)
                while len(parcels) < self.ranks:
                    parcels.append(self._receive(0, deadline + GRACE_S))
        except BaseException as error:
            for parcel in parcels:
                for fd in parcel.fds:
                    os.close(fd)
            self.abort(error)
            raise
        return parcels

    def abort(self, error: BaseException) -> None:
        """Send the peers the reason, as far as they can be reached, and close at once."""
        for sock in list(self.sockets.values()):  # another thread may close meanwhile
            if self.rank == 0 and isinstance(error, RingsideError):
                with contextlib.suppress(OSError):
                    sock.settimeout(0.1)
                    send_message(sock, None, problem=error)
        self.close()

    def close(self) -> None:
        """Close the sockets, and the pidfds unless they are lent."""
        # A close ends the wait of another thread, which closes as well: whoever takes the token does it. No lock, for a
        # forked child would inherit it as it is held.
        try:
            self._open.pop()
        except IndexError:
            return
        sockets, self.sockets = self.sockets, {}
        pidfds, self.pidfds = self.pidfds, [-1] * len(self.pidfds)
        for sock in sockets.values():
            sock.close()
        for fd in pidfds:
            if fd >= 0 and not self.lent:
                os.close(fd)

    def _send(self, peer: int, value: Any, fds: Sequence[int], deadline: float) -> None:
        sock = self.sockets[peer]
        try:
            sock.settimeout(_remaining(deadline))
            send_message(sock, value, fds)
        except (OSError, EOFError) as error:
            raise self._lost(peer, error) from None

    def _receive(self, peer: int, deadline: float) -> Parcel:
        sock = self.sockets[peer]
        try:
            self._await_readable(sock, peer, deadline)
            sock.settimeout(_remaining(deadline))
            return receive_message(sock)
        except RingsideError:
            raise
        except (OSError, EOFError) as error:
            raise self._lost(peer, error) from None

    def _await_readable(self, sock: socket.socket, peer: int, deadline: float) -> None:
        """Return when the peer has sent something; raise where a rank dies or leaves first, or it is too late."""
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        for fd in self.pidfds:
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        others = {other.fileno(): rank for rank, other in self.sockets.items() if rank != peer}
        for fd in others:
            poll.register(fd, select.POLLRDHUP)  # nobody leaves in the middle of an exchange
        while True:
            ready = {fd for fd, _ in poll.poll(max(0.0, min(1.0, deadline - time.monotonic())) * 1000)}
            if sock.fileno() < 0:
                raise EOFError("the communicator was closed on this rank meanwhile")
            if sock.fileno() in ready:
                return
            dead = [rank for rank, fd in enumerate(self.pidfds) if fd in ready]
            if dead:
                raise PeerLostError(f"{CLOSED}: {name_ranks(dead)} died while ranks exchanged memory", dead)
            left = [others[fd] for fd in ready if fd in others]
            if left:
                raise PeerLostError(f"{CLOSED}: {name_ranks(left)} left while ranks exchanged memory", left)
            if time.monotonic() > deadline:
                raise _late(peer)

    def _lost(self, peer: int, error: Exception) -> PeerLostError | DeadlineError:
        if isinstance(error, TimeoutError):
            return _late(peer)
        # A dying process closes its sockets before its pidfd becomes readable, and a rank that noticed it closes its
        # own in turn: wait a little for the one that really died.
        ready = _readable(self.pidfds, DEATH_GRACE_S)
        dead = [rank for rank, fd in enumerate(self.pidfds) if fd in ready] or [peer]
        return PeerLostError(f"{CLOSED}: {name_ranks(dead)} died or left while ranks exchanged memory ({error})", dead)


def _late(peer: int) -> DeadlineError:
    return DeadlineError(f"Timed out: rank {peer} did not take part in exchanging memory", [peer])


def meet(key: str, rank: int, ranks: int, settings: tuple[int, ...], *, timeout_s: float) -> Hub:
    """Connect the ranks of one host that know the same `key`.

    Args:
        key: Names this communicator; equal on all its ranks and on nobody else's.
        rank: This rank, 0 to ranks - 1.
        ranks: Number of ranks.
        settings: The settings that must be equal on all ranks.
        timeout_s: How long to wait for the others, seconds.

    Errors: `DeadlineError` naming who is missing, `MismatchError` where versions or settings differ, `UsageError` for a
    rank that is taken or out of range.
    """
    if not 0 <= rank < ranks:
        raise UsageError(f"rank {rank} is not in 0 to {ranks - 1}: check RANK and WORLD_SIZE")
    if ranks == 1:
        return Hub(0, 1, {}, [-1])
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        return _listen(key, ranks, settings, deadline)
    return _connect(key, rank, ranks, settings, deadline)


def _listen(key: str, ranks: int, settings: tuple[int, ...], deadline: float) -> Hub:
    """Meet as rank 0: accept all others, then send each of them the pidfds of all."""
    with listening(key, ranks) as servers:
        hub = Hub(0, ranks, {}, [-1] * ranks)
        try:
            _gather(servers, hub, settings, deadline)
            own = os.pidfd_open(os.getpid())
            try:
                fds = [own if r == 0 else hub.pidfds[r] for r in range(hub.ranks)]
                for peer in hub.sockets:
                    hub._send(peer, None, fds, deadline)
            finally:
                os.close(own)
        except BaseException as error:
            hub.abort(error)
            raise
    return hub


def _gather(servers: Mapping[int, socket.socket], hub: Hub, settings: tuple[int, ...], deadline: float) -> None:
    """Wait for all ranks; where one does not fit, a little longer for the rest, so that they get the reason too."""
    refusal: MismatchError | None = None
    while len(hub.sockets) < hub.ranks - 1:
        try:
            sock, hello = _accept(servers, hub, deadline)
        except DeadlineError:
            if refusal is None:
                raise
            break
        rank, taken = hello["rank"], hello["rank"] in hub.sockets
        objection = _objection(hello, hub, settings)
        if objection and refusal is None:
            refusal = MismatchError(objection, [rank])
            deadline = min(deadline, time.monotonic() + _REFUSAL_S)
        hub.sockets[-len(hub.sockets) - 1 if taken else rank] = sock  # a second one is kept too: it gets the reason
        if 0 < rank < hub.ranks and not taken:
            pid = credentials(sock)[0]
            try:
                hub.pidfds[rank] = os.pidfd_open(pid)
            except OSError as error:
                raise UnsupportedError(
                    f"cannot watch process {pid} ({error}): ranks must share a PID namespace with rank 0, on Linux 5.3 "
                    "or newer"
                ) from None
    if refusal is not None:
        raise refusal


def _accept(servers: Mapping[int, socket.socket], hub: Hub, deadline: float) -> tuple[socket.socket, dict[str, Any]]:
    """Return the connection and the first message of the next rank that comes; raise where one that came dies."""
    while True:
        ready = _readable((*servers, *hub.pidfds), max(0.0, deadline - time.monotonic()))
        dead = [rank for rank, fd in enumerate(hub.pidfds) if fd in ready]
        if dead:
            raise PeerLostError(f"{CLOSED}: {name_ranks(dead)} died while ranks waited for each other to start", dead)
        if not ready:
            missing = [r for r in range(1, hub.ranks) if r not in hub.sockets]
            raise DeadlineError(f"Timed out: {name_ranks(missing)} did not come to the rendezvous", missing)
        for server in [server for fd, server in servers.items() if fd in ready]:
            sock, _ = server.accept()
            try:
                if credentials(sock)[1] == os.getuid():
                    sock.settimeout(_remaining(min(deadline, time.monotonic() + GRACE_S)))
                    return sock, receive_message(sock).value
            except (OSError, EOFError, msgspec.MsgspecError):
                pass  # it died, or does not speak our protocol
            sock.close()


def _objection(hello: dict[str, Any], hub: Hub, settings: tuple[int, ...]) -> str:
    """Return why a rank does not fit; "": it does."""
    peer = hello["rank"]
    if peer in hub.sockets or peer == 0:
        return f"two processes claim to be rank {peer}"
    if hello["ranks"] != hub.ranks:
        return f"rank {peer} thinks there are {hello['ranks']} ranks, rank 0 thinks {hub.ranks}"
    if hello["protocol"] != PROTOCOL:
        return f"rank {peer} runs another version of ringside than rank 0"
    if tuple(hello["settings"]) != settings:
        return f"rank {peer} has other RINGSIDE_* settings ({hello['settings']}) than rank 0 ({list(settings)})"
    return ""


def _connect(key: str, rank: int, ranks: int, settings: tuple[int, ...], deadline: float) -> Hub:
    """Meet as any rank but 0."""
    pause = 0.001
    while (sock := connect(key)) is None:
        if time.monotonic() > deadline:
            raise DeadlineError("Timed out: rank 0 did not come to the rendezvous (is it on this host?)", [0])
        time.sleep(pause)  # rank 0 is not there yet, and no descriptor that could be polled
        pause = min(pause * 1.5, 0.05)
    hub = Hub(rank, ranks, {0: sock}, [])
    try:
        hub._send(0, {"rank": rank, "ranks": ranks, "protocol": PROTOCOL, "settings": settings}, (), deadline)
        welcome = hub._receive(0, deadline + GRACE_S)
        if not welcome.fds:
            raise RingsideError(f"rank {rank} has too many files open to watch its peers: raise `ulimit -n`")
    except BaseException:
        hub.close()
        raise
    hub.pidfds = list(welcome.fds)
    os.close(hub.pidfds[rank])
    hub.pidfds[rank] = -1
    return hub


def send_message(
    sock: socket.socket, value: Any, fds: Sequence[int] = (), problem: RingsideError | None = None
) -> None:
    """Send one value with descriptors over a stream socket, or an error, which is raised where it is received."""
    told = None if problem is None else (type(problem).__name__, str(problem), getattr(problem, "ranks", ()))
    body = msgspec.msgpack.encode((value, len(fds), told))
    sock.sendall(struct.pack("!I", len(body)) + body)
    for first in range(0, len(fds), _FDS_PER_MESSAGE):  # each on a byte of its own: a descriptor needs one
        socket.send_fds(sock, [b"f"], list(fds[first : first + _FDS_PER_MESSAGE]))


_decode = msgspec.msgpack.Decoder(tuple[Any, int, tuple[str, str, tuple[int, ...]] | None]).decode


def receive_message(sock: socket.socket) -> Parcel:
    """Receive a message of `send_message`; `EOFError` when the other end is gone, `OSError` for anything else.

    Descriptors come all or none: where this process has too many files open, the parcel has none of them.
    """
    (size,) = struct.unpack("!I", _receive_exactly(sock, 4))
    if size > _MAX_MESSAGE:
        raise OSError(errno.EMSGSIZE, "an impossible message length")
    try:
        value, count, problem = _decode(_receive_exactly(sock, size))
    except UNDECODABLE as error:
        raise OSError(errno.EBADMSG, f"what came is no message of ours: {error}") from None
    if problem is not None:
        name, message, ranks = problem
        for error_type in (PeerLostError, DeadlineError, MismatchError):
            if name == error_type.__name__:
                raise error_type(message, ranks)
        raise UnsupportedError(message) if name == "UnsupportedError" else RingsideError(message)
    fds: list[int] = []
    for _ in range(0, count, _FDS_PER_MESSAGE):
        # `socket.recv_fds` does not pass its flags on, up to Python 3.11 at least.
        room = socket.CMSG_LEN(_FDS_PER_MESSAGE * _FD_BYTES)
        data, ancillary, _, _ = sock.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError("the connection closed in the middle of a message")
        for level, kind, block in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds += memoryview(block[: len(block) // _FD_BYTES * _FD_BYTES]).cast("i")
    if len(fds) != count:
        for fd in fds:
            os.close(fd)
        fds = []
    return Parcel(value, tuple(fds))


def _own_parcel(value: Any, fds: Sequence[int]) -> Parcel:
    copies: list[int] = []  # the receiver owns descriptors, this rank as well
    try:
        for fd in fds:
            copies.append(os.dup(fd))
    except OSError:
        for fd in copies:
            os.close(fd)
        return Parcel(value)
    return Parcel(value, tuple(copies))


def _readable(fds: Iterable[int], timeout_s: float) -> set[int]:
    """Return which descriptors can be read, as soon as any can or the time is over; below 0 there is none."""
    poll = select.poll()
    for fd in fds:
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(timeout_s * 1000)}


def _remaining(deadline: float) -> float:
    return max(0.1, deadline - time.monotonic())


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(size - len(parts))
        if not part:
            raise EOFError("the connection closed")
        parts += part
    return bytes(parts)

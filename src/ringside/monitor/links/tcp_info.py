"""What the kernel knows of this process's own TCP connections: bytes, and for how long the wire had them.

Nothing is put between a program and its sockets. A process may ask the kernel about every connection it holds
(`getsockopt(TCP_INFO)`, Linux 4.10 and later), whoever opened it: Gloo, NCCL or ourselves. No privilege is needed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator
from typing import NamedTuple

_FDS = "/proc/self/fd"
_BYTES = 256
_LEAST_BYTES = 216  # up to and with tcpi_bytes_retrans
_MAPPED = "::ffff:"
_MICROSECONDS = 1e-6


class TcpEndpoint(NamedTuple):
    """One end of a connection; an IPv4 address that travels as IPv6 is given as IPv4."""

    address: str
    port: int

    def __str__(self) -> str:
        return f"{self.address} {self.port}"


class TcpCounters(NamedTuple):
    """What one connection has done since it was opened.

    Args:
        acked_bytes: Bytes the peer's kernel has acknowledged.
        received_bytes: Bytes that came from the peer.
        busy_seconds: Time with data under way or waiting to be; the kernel counts in ticks of 1 to 10 ms.
        window_seconds: The part of it in which the peer had no room left: it did not read.
        delivery_bytes_per_s: Rate of the newest stretch of data, over one round trip; 0 where that was so short that it
            does not tell how fast the wire is.
        rtt_seconds: Smoothed round trip.
        retransmitted_bytes: Bytes sent again.
    """

    acked_bytes: int
    received_bytes: int
    busy_seconds: float
    window_seconds: float
    delivery_bytes_per_s: float
    rtt_seconds: float
    retransmitted_bytes: int


class TcpConnection(NamedTuple):
    """A TCP connection to another host.

    Args:
        inode: Identifies a connection for as long as it lives.
        local: This end.
        remote: The other.
        counters: What it has done so far.
    """

    inode: int
    local: TcpEndpoint
    remote: TcpEndpoint
    counters: TcpCounters


def read_counters(info: bytes) -> TcpCounters | None:
    """Return what `struct tcp_info` (linux/tcp.h) holds; None where the kernel is too old to fill in all of it."""
    if len(info) < _LEAST_BYTES:
        return None
    short = info[7] & 1  # tcpi_delivery_rate_app_limited: there was no more to send
    (rtt,) = struct.unpack_from("I", info, 68)
    acked, received = struct.unpack_from("QQ", info, 120)
    delivery, busy, window = struct.unpack_from("QQQ", info, 160)
    (retransmitted,) = struct.unpack_from("Q", info, 208)
    return TcpCounters(
        acked_bytes=acked,
        received_bytes=received,
        busy_seconds=busy * _MICROSECONDS,
        window_seconds=window * _MICROSECONDS,
        delivery_bytes_per_s=0.0 if short else float(delivery),
        rtt_seconds=rtt * _MICROSECONDS,
        retransmitted_bytes=retransmitted,
    )


def has_tcp_info() -> bool:
    """Return whether this kernel counts what is needed of its connections."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir(_FDS):
        return False
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return read_counters(_ask(sock)) is not None
    return False


def connections(*, within_host: bool = False) -> Iterator[TcpConnection]:
    """Yield this process's TCP connections; those that end on the same host only if requested.

    Every connection is read through a duplicate of its descriptor that lives for some microseconds, so that its
    owner may close it at any moment.
    """
    for name in os.listdir(_FDS):
        try:
            status = os.fstat(int(name))
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                    continue
                local, remote = _endpoint(sock.getsockname()), _endpoint(sock.getpeername())
                if local.address == remote.address and not within_host:
                    continue
                counters = read_counters(_ask(sock))
        except OSError:
            continue  # closed meanwhile, not connected, or no TCP
        if counters is not None:
            yield TcpConnection(status.st_ino, local, remote, counters)


def _ask(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)


def _endpoint(name: tuple[str, int]) -> TcpEndpoint:
    address, port = name[:2]
    return TcpEndpoint(address.removeprefix(_MAPPED), port)

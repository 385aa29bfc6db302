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
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ringside.isolation import Guard
from ringside.monitor.run.records import StepRecord, Wire
from ringside.monitor.stats import Floats

_FDS = "/proc/self/fd"
_BYTES = 256
_LEAST_BYTES = 216  # up to and with tcpi_bytes_retrans
_MICROSECONDS = 1e-6


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
        local: This end, `address port`; an IPv4 address that travels as IPv6 is given as IPv4.
        remote: The other.
        counters: What it has done so far.
    """

    inode: int
    local: str
    remote: str
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
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        return os.path.isdir(_FDS) and read_counters(_ask(sock)) is not None
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
                local, remote = (_end(*name[:2]) for name in (sock.getsockname(), sock.getpeername()))
                if _address(local) == _address(remote) and not within_host:
                    continue
                counters = read_counters(_ask(sock))
        except OSError:
            continue  # closed meanwhile, not connected, or no TCP
        if counters is not None:
            yield TcpConnection(status.st_ino, local, remote, counters)


def _ask(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)


def _end(address: str, port: int) -> str:
    return f"{address.removeprefix('::ffff:')} {port}"


def _address(end: str) -> str:
    return end.rpartition(" ")[0]


# -------------------------------------------------------------------------------------------------
# Wire per link: what each rank sent to each other host, and for how long the wire had it.
#
# Two numbers of the kernel tell a slow wire from a late peer. A connection is *busy* while data of ours is under way;
# for a part of that the peer's *window* is shut, because it does not read. What is left is wire time. While nobody
# sends, or the peer takes its time before it asks, a connection is idle and nothing is counted.

PERIOD_S = 1.0
"""How often connections are read: long against the kernel's ticks, short against what a verdict takes."""

QUIET_PERIOD_S = 5.0
"""How often where there is nothing to see."""

LEAST_BYTES = 1 << 16
"""Connections that carry less in a period are left out (stores, logging, heartbeats)."""

MOST_WIRES = 32
"""Connections that one rank records in a period, those that carried most."""

COST_RATIO = 0.002
"""Looking takes at most this share of one core: with thousands of connections it is done less often."""

RATES_KEPT = 256
MOST_LINKS = 64
ENDS_KEPT = 1 << 16
"""Ends of connections that are remembered, the newest: one that connects anew for everything has ever new ones."""

Link = tuple[int, int]


class LinkSampler:
    """Makes this rank's `Wire`s: the differences between two readings of its connections.

    Args:
        read: Returns the connections to other hosts.
        now: Monotonic seconds.
        cpu: CPU seconds of the calling thread.
        period_s: How often it reads.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[TcpConnection]] = connections,
        *,
        now: Callable[[], float] = time.perf_counter,
        cpu: Callable[[], float] = time.thread_time,
        period_s: float = PERIOD_S,
    ) -> None:
        self._is_uncounted = read is connections and not has_tcp_info()
        self._guard = Guard(warning="links are not watched any more")
        self._read, self._now, self._cpu, self._period_s = read, now, cpu, period_s
        self._before: dict[int, TcpCounters] = {}
        self._last = self._due = now()

    @property
    def off(self) -> bool:
        """Whether it reads no more: this kernel does not count, or reading failed."""
        return self._is_uncounted or self._guard.tripped

    def add_to(self, batch: list[StepRecord]) -> list[StepRecord]:
        """Return a batch of records whose newest holds what the links carried, if a period has ended."""
        wires = self._guard.run(self.sample, default=()) if batch else ()
        return [*batch[:-1], msgspec.structs.replace(batch[-1], wires=wires)] if wires else batch

    def sample(self) -> tuple[Wire, ...]:
        """Return what was sent in the period that ended, if one did; those that carried most first."""
        began = self._now()
        if self.off or began < self._due:
            return ()
        cpu_began = self._cpu()
        seen = list(self._read())
        seconds, self._last = began - self._last, began
        moved: list[tuple[int, Wire]] = []  # the bytes that went the busier way, and what was sent
        for connection in seen:
            was, now = self._before.get(connection.inode), connection.counters
            if was is None:
                continue  # new in this period: from when on is not known
            window = max(now.window_seconds - was.window_seconds, 0.0)
            wire = Wire(
                seconds=seconds,
                sent_bytes=max(now.acked_bytes - was.acked_bytes, 0),
                wire_seconds=max(now.busy_seconds - was.busy_seconds - window, 0.0),
                window_seconds=window,
                delivery_bytes_per_s=now.delivery_bytes_per_s,
                rtt_seconds=now.rtt_seconds,
                retransmitted_bytes=max(now.retransmitted_bytes - was.retransmitted_bytes, 0),
                local=connection.local,
                remote=connection.remote,
            )
            # A rank that only receives records this as well: no other knows whose that end of the connection is.
            moved.append((max(wire.sent_bytes, now.received_bytes - was.received_bytes), wire))
        self._before = {connection.inode: connection.counters for connection in seen}
        cost_s = self._cpu() - cpu_began
        self._due = began + max(self._period_s if seen else QUIET_PERIOD_S, cost_s / COST_RATIO)
        moved = [pair for pair in moved if pair[0] >= LEAST_BYTES]
        moved.sort(key=lambda pair: -pair[0])
        return tuple(wire for _, wire in moved[:MOST_WIRES])


class LinkMap:
    """Which rank is at the other end: learned from what every rank calls its own end of a connection.

    An end that no rank has called its own is taken for the lowest rank that has a connection from the same address.

    Args:
        ends_kept: How many ends of connections are known at most; then the oldest go.
    """

    def __init__(self, ends_kept: int = ENDS_KEPT) -> None:
        self._ends_kept = ends_kept
        self._ends: dict[str, int] = {}
        self._addresses: dict[str, int] = {}

    def resolve(self, record: StepRecord) -> StepRecord:
        """Return the record with the peers of its wires filled in, as far as they are known by now."""
        if not record.wires:
            return record
        for wire in record.wires:
            self._ends.pop(wire.local, None)  # the newest last
            self._ends[wire.local] = record.rank
            address = _address(wire.local)
            self._addresses[address] = min(self._addresses.get(address, record.rank), record.rank)
        while len(self._ends) > self._ends_kept:
            del self._ends[next(iter(self._ends))]
        peers = [self._ends.get(wire.remote, self._addresses.get(_address(wire.remote), -1)) for wire in record.wires]
        wires = [msgspec.structs.replace(wire, peer=peer) for wire, peer in zip(record.wires, peers, strict=True)]
        return msgspec.structs.replace(record, wires=tuple(wires))


def wires_by_link(record: StepRecord) -> dict[Link, list[Wire]]:
    """Return what a record's rank sent, by link; a rank may have several connections to one peer."""
    found: defaultdict[Link, list[Wire]] = defaultdict(list)
    for wire in record.wires:
        if wire.peer >= 0 and wire.peer != record.rank and wire.sent_bytes >= LEAST_BYTES:
            found[record.rank, wire.peer].append(wire)
    return found


class Period(NamedTuple):
    """What one link did in one period.

    Args:
        step: The first step that ended in it, on the sender.
        seconds: Its length.
        sent_bytes: What it carried.
        wire_seconds: For how long.
        bytes_per_s: Its rate: the larger of `mean_bytes_per_s` and the kernel's own.
    """

    step: int
    seconds: float
    sent_bytes: int
    wire_seconds: float
    bytes_per_s: float

    @property
    def mean_bytes_per_s(self) -> float:
        """Bytes over wire time; 0 where there was none."""
        return self.sent_bytes / self.wire_seconds if self.wire_seconds else 0.0


def combine_wires(step: int, wires: Sequence[Wire]) -> Period:
    """Return what the connections of one link did together, in the period that began with a step."""
    # Several connections to one peer share the wire: their times overlap, their bytes add up.
    seconds = max(wire.seconds for wire in wires)
    return Period(
        step=step,
        seconds=seconds,
        sent_bytes=sum(wire.sent_bytes for wire in wires),
        wire_seconds=min(sum(wire.wire_seconds for wire in wires), seconds),
        bytes_per_s=sum(wire.bytes_per_s for wire in wires),
    )


class LinkTotals(msgspec.Struct, frozen=True, kw_only=True):
    """One link over a run, as `summary.json` shows it.

    Args:
        src: The sending rank.
        dst: The receiving rank.
        sent_bytes: All it carried.
        wire_seconds: For how long it carried it.
        wire_ratio: Which share of the time it was watched that is.
        bytes_per_s: Its rate: the median over periods.
        retransmitted_bytes: Bytes sent again.
    """

    src: int
    dst: int
    sent_bytes: int
    wire_seconds: float
    wire_ratio: float
    bytes_per_s: float
    retransmitted_bytes: int


class LinkLedger:
    """Adds up what links carried; memory is O(links), and `RATES_KEPT` rates of each."""

    def __init__(self) -> None:
        self._sums: defaultdict[Link, Floats] = defaultdict(lambda: np.zeros(4))
        self._rates: defaultdict[Link, list[float]] = defaultdict(list)

    def reading(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Yield the records, and add up what their wires carried."""
        for record in records:
            for link, wires in wires_by_link(record).items():
                period = combine_wires(record.step, wires)
                again = sum(wire.retransmitted_bytes for wire in wires)
                self._sums[link] += (period.sent_bytes, period.wire_seconds, period.seconds, again)
                rates = self._rates[link]
                rates.append(period.bytes_per_s)
                if len(rates) > RATES_KEPT:
                    del rates[::2]
            yield record

    def totals(self) -> list[LinkTotals]:
        """Return the links, slowest first; of very many those that carried most."""
        found = []
        for src, dst in sorted(self._sums, key=lambda link: -self._sums[link][0])[:MOST_LINKS]:
            sent, wire, seconds, again = self._sums[src, dst].tolist()
            rates = self._rates[src, dst]
            found.append(
                LinkTotals(
                    src=src,
                    dst=dst,
                    sent_bytes=int(sent),
                    wire_seconds=wire,
                    wire_ratio=wire / seconds if seconds > 0 else 0.0,
                    bytes_per_s=sorted(rates)[len(rates) // 2],
                    retransmitted_bytes=int(again),
                )
            )
        return sorted(found, key=lambda total: total.bytes_per_s)

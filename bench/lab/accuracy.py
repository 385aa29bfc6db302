"""How well a lab keeps what it promises: real TCP streams and round trips between its hosts.

`python -m bench.lab.accuracy` (as root) prints the table of docs/lab.md.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ringside.lab.lab import Lab
from ringside.lab.wiring import payload_bytes_per_second

PIECE_BYTES = 1 << 18
_LIMIT_S = 30.0  # for any one call on a socket


@dataclass(frozen=True)
class Flow:
    """What a receiver saw.

    Args:
        size_bytes: Payload after its first piece.
        first_s: When that first piece came, seconds on the host's monotonic clock.
        last_s: When the last came.
    """

    size_bytes: int
    first_s: float
    last_s: float

    @property
    def bytes_per_second(self) -> float:
        """How fast its payload came."""
        return self.size_bytes / max(self.last_s - self.first_s, 1e-9)


def summed_rate(flows: Sequence[Flow]) -> float:
    """Return how fast the payload of several flows came in sum, bytes/s."""
    span = max(flow.last_s for flow in flows) - min(flow.first_s for flow in flows)
    return sum(flow.size_bytes for flow in flows) / max(span, 1e-9)


def stream_between(lab: Lab, flows: Sequence[tuple[int, int]], size_bytes: int) -> list[Flow]:
    """Send bytes over TCP between hosts, all flows at once, and return how each was received.

    Args:
        lab: Where.
        flows: (from host, to host).
        size_bytes: How much each sends.

    Returns:
        What the receiver of each flow saw.

    Raises:
        TimeoutError: Nothing moved for 30 s.
    """
    with contextlib.ExitStack() as stack:
        pairs = [stack.enter_context(connect_hosts(lab, source, target)) for source, target in flows]
        pool = stack.enter_context(ThreadPoolExecutor(2 * len(pairs), "ringside-lab-stream"))
        received = [pool.submit(receive_bytes, target, size_bytes) for _, target in pairs]
        sent = [pool.submit(_send_bytes, source, size_bytes) for source, _ in pairs]
        for future in sent:
            future.result()
        return [future.result() for future in received]


def round_trips(lab: Lab, a: int, b: int, count: int, size_bytes: int = 4) -> list[float]:
    """Send a message to and fro over TCP without Nagle's delay; return what each round trip took, seconds."""
    with connect_hosts(lab, a, b) as (here, there), ThreadPoolExecutor(1, "ringside-lab-echo") as pool:
        echo, took = pool.submit(_echo_messages, there, count, size_bytes), []
        for _ in range(count):
            since = time.perf_counter()
            here.sendall(bytes(size_bytes))
            _receive_exactly(here, size_bytes)
            took.append(time.perf_counter() - since)
        echo.result()
    return took


@contextlib.contextmanager
def connect_hosts(lab: Lab, a: int, b: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give a TCP connection between two hosts: the socket on `a`, the socket on `b`. Every call on them is bounded."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(lab.inside(b, lambda: socket.create_server((lab.address(b), 0))))
        listener.settimeout(_LIMIT_S)
        here = stack.enter_context(lab.inside(a, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)))
        here.settimeout(_LIMIT_S)
        here.connect(listener.getsockname())
        there = stack.enter_context(listener.accept()[0])
        there.settimeout(_LIMIT_S)
        for end in (here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield here, there


def _send_bytes(end: socket.socket, size_bytes: int) -> None:
    piece = bytes(PIECE_BYTES)
    for start in range(0, size_bytes, PIECE_BYTES):
        end.sendall(piece[: min(PIECE_BYTES, size_bytes - start)])


def receive_bytes(end: socket.socket, size_bytes: int) -> Flow:
    """Receive so many bytes; `ConnectionError` if the connection is closed before."""
    buffer = bytearray(PIECE_BYTES)
    first = end.recv_into(buffer)  # what came before the first look at the clock does not count
    since, got = time.monotonic(), first
    while got < size_bytes:
        count = end.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the other end closed the connection")
        got += count
    return Flow(got - first, since, time.monotonic())


def _echo_messages(end: socket.socket, count: int, size_bytes: int) -> None:
    for _ in range(count):
        end.sendall(_receive_exactly(end, size_bytes))


def _receive_exactly(end: socket.socket, size_bytes: int) -> bytes:
    got = b""
    while len(got) < size_bytes:
        got += end.recv(size_bytes - len(got))
    return got


def _shares_of_rate(rate: str, seconds: float, delay_s: float) -> tuple[float, float, float]:
    """Return the share of the payload rate that one stream, the slower of two opposed and three to one reach."""
    full = payload_bytes_per_second(rate)
    size = int(full * seconds)
    with Lab(hosts=4, rate=rate, delay_s=delay_s) as lab:
        one = summed_rate(stream_between(lab, [(0, 1)], size))
        both = min(flow.bytes_per_second for flow in stream_between(lab, [(0, 1), (1, 0)], size))
        incast = summed_rate(stream_between(lab, [(1, 0), (2, 0), (3, 0)], size // 3))
    return one / full, both / full, incast / full


def _round_trip_s(wiring: str, delay_s: float) -> float:
    with Lab(hosts=2, rate="1gbit", delay_s=delay_s, wiring=wiring) as lab:
        return statistics.median(round_trips(lab, 0, 1, 200))


def main() -> None:
    """Print the table."""
    reason = Lab.unavailable(delay=True)
    if reason:
        sys.exit(reason)
    print("share of the payload rate      one stream   both ways   3 to 1")
    for rate, delay_s in (("10mbit", 0), ("100mbit", 0), ("250mbit", 0), ("1gbit", 0), ("2.5gbit", 0), ("1gbit", 1e-3)):
        shares = "".join(
            f"{statistics.median(column):>11.3f}"
            for column in zip(*(_shares_of_rate(rate, 1, delay_s) for _ in range(3)), strict=True)
        )
        print(f"{rate:>10}, delay {1e3 * delay_s:g} ms      {shares}")
    print("round trip, ms                 asked        star        mesh")
    for delay_s in (0.0, 1e-3, 5e-3, 20e-3):
        trips_ms = (1e3 * _round_trip_s(wiring, delay_s) for wiring in ("star", "mesh"))
        print(f"{2e3 * delay_s:>36.1f} {' '.join(f'{trip_ms:>11.3f}' for trip_ms in trips_ms)}")


if __name__ == "__main__":
    main()

"""The kernel's own counters, over real loopback sockets."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from ringside.monitor.links.sampler import TcpConnection, connections, has_tcp_info, read_counters

pytestmark = pytest.mark.skipif(not has_tcp_info(), reason="this kernel's TCP_INFO holds too little")

MB = 1_000_000
LIMIT_S = 20.0
SO_MAX_PACING_RATE = 47


@contextlib.contextmanager
def pair(*, room: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two connected sockets; `room` bounds the receiver's buffer."""
    with socket.socket() as listener:
        if room:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        sender = socket.create_connection(listener.getsockname(), timeout=LIMIT_S)
        receiver, _ = listener.accept()
    with sender, receiver:
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        receiver.settimeout(LIMIT_S)
        yield sender, receiver


def end(name: tuple[str, int]) -> str:
    return f"{name[0]} {name[1]}"


def look(sock: socket.socket) -> TcpConnection:
    (found,) = [one for one in connections(within_host=True) if one.local == end(sock.getsockname())]
    return found


def drain(sock: socket.socket, size: int) -> None:
    left = size
    while left:
        left -= len(sock.recv(min(left, 1 << 20)))


def acknowledged(sender: socket.socket, size: int) -> TcpConnection:
    """Return the connection once the peer's kernel has acknowledged so much."""
    deadline = time.monotonic() + LIMIT_S
    while (found := look(sender)).counters.acked_bytes < size:
        assert time.monotonic() < deadline
        time.sleep(0.002)  # the kernel tells nobody
    return found


def test_bytes_and_ends_are_those_of_the_socket() -> None:
    with pair() as (sender, receiver):
        reader = threading.Thread(target=drain, args=(receiver, 3 * MB))
        reader.start()
        sender.sendall(bytes(3 * MB))
        reader.join(LIMIT_S)
        found = acknowledged(sender, 3 * MB)
        assert found.remote == f"127.0.0.1 {receiver.getsockname()[1]}"
        assert look(receiver).counters.received_bytes == 3 * MB
        assert look(receiver).inode != found.inode


def test_a_slow_wire_is_busy_and_its_rate_is_the_wires() -> None:
    """The kernel paces the sender to 4 MB/s: data is under way all the time, and the receiver has room."""
    with pair() as (sender, receiver):
        sender.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 4 * MB)
        reader = threading.Thread(target=drain, args=(receiver, 2 * MB))
        reader.start()
        sender.sendall(bytes(2 * MB))
        reader.join(LIMIT_S)
        counters = acknowledged(sender, 2 * MB).counters
    wire_s = counters.busy_seconds - counters.window_seconds
    assert wire_s >= 0.8 * counters.busy_seconds
    assert 1.5 * MB < 2 * MB / wire_s < 8 * MB


def test_a_slow_reader_shuts_its_window_and_that_is_no_wire_time() -> None:
    with pair(room=1 << 16) as (sender, receiver):
        sending = threading.Thread(target=sender.sendall, args=(bytes(4 * MB),))
        sending.start()
        deadline = time.monotonic() + LIMIT_S
        while look(sender).counters.window_seconds < 0.3:  # nobody reads
            assert time.monotonic() < deadline
            time.sleep(0.01)
        stuck = look(sender).counters
        drain(receiver, 4 * MB)
        sending.join(LIMIT_S)
    assert stuck.acked_bytes < MB
    assert stuck.window_seconds >= 0.7 * stuck.busy_seconds


def test_an_idle_connection_counts_nothing() -> None:
    with pair() as (sender, receiver):
        sender.sendall(bytes(1000))
        drain(receiver, 1000)
        before = acknowledged(sender, 1000).counters
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            after = look(sender).counters
            time.sleep(0.02)  # time passes, and nothing happens: that is what is tested
        assert after == before


def test_connections_within_the_host_and_other_sockets_are_left_out() -> None:
    with pair(), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_INET, socket.SOCK_DGRAM), socket.socket():
        assert [one for one in connections() if one.local.startswith("127.0.0.1 ")] == []


def test_looking_neither_keeps_nor_closes_a_connection() -> None:
    with pair() as (sender, receiver):
        for _ in range(100):
            look(sender)
        sender.sendall(b"x")
        assert receiver.recv(1) == b"x"
        sender.close()
        assert receiver.recv(1) == b""


def test_an_old_kernels_answer_is_none() -> None:
    assert read_counters(bytes(104)) is None


def test_a_stretch_that_was_too_short_gives_no_rate() -> None:
    info = bytearray(256)
    struct.pack_into("Q", info, 160, 12_345)
    told = read_counters(bytes(info))
    info[7] = 1
    silent = read_counters(bytes(info))
    assert told is not None
    assert silent is not None
    assert (told.delivery_bytes_per_s, silent.delivery_bytes_per_s) == (12_345.0, 0.0)

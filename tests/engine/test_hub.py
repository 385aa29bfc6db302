"""How ranks of a host hand values and descriptors around, over sockets that are there: ranks as threads."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.threads import together
from tests.support.waiting import Clock

from ringside.engine.shm import rendezvous
from ringside.engine.shm.rendezvous import Hub, receive_message, send_message
from ringside.errors import DeadlineError, MismatchError, PeerLostError, RingsideError, UnsupportedError

WAIT_S = 20.0


@contextmanager
def hubs(ranks: int) -> Iterator[list[Hub]]:
    pairs = {rank: socket.socketpair() for rank in range(1, ranks)}
    made = [Hub(0, ranks, {rank: pair[0] for rank, pair in pairs.items()}, [-1] * ranks)]
    made += [Hub(rank, ranks, {0: pairs[rank][1]}, [-1] * ranks) for rank in range(1, ranks)]
    try:
        yield made
    finally:
        for hub in made:
            hub.close()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_everybody_gets_everybody_s_value_and_descriptors(ranks: int) -> None:
    """A rank's own descriptors as well, as copies."""
    given = [[os.memfd_create(f"test-of-ringside-{rank}-{k}") for k in range(rank)] for rank in range(ranks)]
    inodes = [[os.fstat(fd).st_ino for fd in fds] for fds in given]
    with hubs(ranks) as made:
        for turn in range(2):
            calls = [
                partial(hub.exchange, {"turn": turn, "rank": hub.rank}, given[hub.rank], timeout_s=WAIT_S)
                for hub in made
            ]
            for parcels in together([*calls]):
                assert [parcel.value for parcel in parcels] == [{"turn": turn, "rank": rank} for rank in range(ranks)]
                assert [[os.fstat(fd).st_ino for fd in parcel.fds] for parcel in parcels] == inodes
                for parcel in parcels:
                    for fd in parcel.fds:
                        assert fd not in given[parcel.value["rank"]]
                        assert not os.get_inheritable(fd)
                        os.close(fd)
    for fds in given:
        for fd in fds:
            os.close(fd)


def test_who_waits_for_rank_0_looks_at_once_and_then_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses = Clock(), list[float]()

    def sleep(seconds: float) -> None:
        assert len(pauses) < 300
        pauses.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(rendezvous, "connect", lambda key: None)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
    with pytest.raises(DeadlineError, match="rank 0 did not come") as late:
        rendezvous.meet("nobody", 1, 2, (), timeout_s=5.0)
    assert late.value.ranks == (0,)
    assert pauses == sorted(pauses)
    assert pauses[0] <= 0.001
    assert 0.04 < pauses[-1] <= 0.05


def kinds(found: list[Any]) -> list[tuple[type, tuple[int, ...]]]:
    return [(type(error), error.ranks) for error in found]


def test_who_does_not_take_part_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with hubs(3) as made:
        found = together([partial(made[rank].exchange, 1, timeout_s=0.1) for rank in (0, 2)])
        assert kinds(found) == [(DeadlineError, (1,))] * 2
        assert str(found[0]) == str(found[1]) == "Timed out: rank 1 did not take part in exchanging memory"
        assert not made[0].sockets
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.1)
    with hubs(3) as made:
        found = together([partial(made[rank].exchange, 1, timeout_s=0.1) for rank in (1, 2)])
        assert kinds(found) == [(DeadlineError, (0,))] * 2


def test_who_leaves_is_named_whoever_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "DEATH_GRACE_S", 0.01)
    for leaving in (1, 2):
        with hubs(3) as made:
            made[leaving].close()
            (found,) = together([partial(made[0].exchange, 1, timeout_s=WAIT_S)])
            assert kinds([found]) == [(PeerLostError, (leaving,))]
    with hubs(3) as made:
        made[0].close()
        found = together([partial(made[rank].exchange, 1, timeout_s=WAIT_S) for rank in (1, 2)])
        assert kinds(found) == [(PeerLostError, (0,))] * 2


def test_who_has_died_is_named_though_its_connection_stands() -> None:
    process = subprocess.Popen(["true"])
    pidfd = os.pidfd_open(process.pid)
    process.wait()
    for waits, dead in ((0, 1), (0, 2), (1, 2)):
        with hubs(3) as made:
            made[waits].pidfds[dead] = os.dup(pidfd)
            (found,) = together([partial(made[waits].exchange, 1, timeout_s=WAIT_S)])
            assert kinds([found]) == [(PeerLostError, (dead,))]
            assert "died" in str(found)
            assert made[waits].pidfds == [-1, -1, -1], "they are closed"
    with hubs(3) as made:  # one that heard of a death leaves in turn
        made[0].pidfds[2] = os.dup(pidfd)
        made[1].close()
        (found,) = together([partial(made[0].exchange, 1, timeout_s=WAIT_S)])
        assert kinds([found]) == [(PeerLostError, (2,))]
    with hubs(2) as made:
        lent = os.dup(pidfd)
        made[0].pidfds[1], made[0].lent = lent, True
        made[0].close()
        os.close(lent)  # it is still open: the core's
    os.close(pidfd)


def test_who_closes_while_another_closes_closes_nothing_twice() -> None:
    """A close ends the wait of another thread, and that one closes as well: here in the middle of the first one."""
    hub = Hub(rank=0, ranks=3, pidfds=[-1, *os.pipe()])
    closed = []

    class Socket:
        def close(self) -> None:
            closed.append(self)
            hub.close()

    hub.sockets = {1: Socket(), 2: Socket()}  # type: ignore[dict-item]
    hub.close()  # a descriptor that is closed twice would raise
    assert len(closed) == len(set(closed)) == 2
    assert (hub.sockets, hub.pidfds) == ({}, [-1, -1, -1])


def test_closing_ends_the_wait_of_another_thread() -> None:
    with hubs(2) as made:
        found: list[Any] = []
        began = threading.Event()

        def wait() -> None:
            began.set()
            found.extend(together([partial(made[0].exchange, 1, timeout_s=WAIT_S)]))

        thread = threading.Thread(target=wait)
        thread.start()
        assert began.wait(WAIT_S)
        made[0].close()
        thread.join(WAIT_S)
        assert [type(error) for error in found] in ([PeerLostError], [KeyError]), found


@pytest.mark.parametrize(
    "error",
    [
        PeerLostError("who died", [3]),
        DeadlineError("who is late", [0, 1]),
        MismatchError("who differs", []),
        UnsupportedError("what cannot be"),
        RingsideError("what else"),
    ],
)
def test_errors_arrive_as_they_were_sent(error: RingsideError) -> None:
    here, there = socket.socketpair()
    with here, there:
        send_message(here, None, problem=error)
        with pytest.raises(type(error)) as raised:
            receive_message(there)
        assert type(raised.value) is type(error)
        assert str(raised.value) == str(error)
        assert getattr(raised.value, "ranks", None) == getattr(error, "ranks", None)


def test_many_descriptors_travel_in_several_messages() -> None:
    here, there = socket.socketpair()
    with here, there, open(os.devnull) as file:
        for count in (0, 1, 200, 201, 450):
            sender = threading.Thread(target=send_message, args=(here, [count], [file.fileno()] * count))
            sender.start()
            parcel = receive_message(there)
            sender.join(WAIT_S)
            assert (parcel.value, len(parcel.fds)) == ([count], count)
            for fd in parcel.fds:
                os.close(fd)


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", EOFError),
        (b"\0\0\0", EOFError),
        (b"\0\0\0\5abc", EOFError),
        (b"\0\0\0\1\xc1", OSError),
        ((1 << 24).to_bytes(4, "big"), EOFError),
        (((1 << 24) + 1).to_bytes(4, "big"), OSError),
        (b"\0\0\0\4\x93\1\1\xc0", EOFError),
    ],
)
def test_what_is_no_message_of_ours_is_an_error(sent: bytes, kind: type[Exception]) -> None:
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall(sent)
        with pytest.raises(kind):
            receive_message(there)

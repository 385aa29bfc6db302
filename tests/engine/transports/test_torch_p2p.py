"""Torch's point-to-point as a transport, between processes."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from tests.support.ranks import Team, hear, on_ranks, outcomes_of, place, say

from ringside.engine.transports.abort import AbortChannel, AbortNotice
from ringside.engine.transports.base import NOBODY, LinkError, LinkFailure
from ringside.engine.transports.gloo import OpenWait, long_awaited
from ringside.engine.transports.gloo_internals import close_connections, watched_connections

from . import conformance
from .vertices import peer_to_peer, store_file

FAR_S = 600.0  # a deadline that no test lives to see: what is heard, is heard of the death


def conforms(path: str, checks: list[str]) -> None:
    """Carry out checks one after the other over one group each of the ranks 0 to n - 1, for several n."""
    here = place()
    for check in checks:
        for size in {2, here.size}:
            if here.rank < size:
                transport = peer_to_peer(path, name=f"{check}/{size}", size=size)
                conformance.FAILURES[check](transport)
                transport.close()


def test_conforms() -> None:
    with store_file() as path:
        on_ranks(4, messages_of_all_kinds, path)


def messages_of_all_kinds(path: str) -> None:
    transport = peer_to_peer(path)
    for check in conformance.CHECKS.values():
        check(transport)
    transport.close()


def test_failures() -> None:
    with store_file() as path:
        on_ranks(4, conforms, path, list(conformance.FAILURES))


def test_a_wait_is_long_when_it_is_still_the_same_one() -> None:
    wait = OpenWait()
    assert not wait.lasts(1.0, 0.0)
    wait.peer, wait.number = 2, 1
    assert not wait.lasts(1.0, 0.1), "seen for the first time"
    assert not wait.lasts(1.0, 1.0)
    assert wait.lasts(1.0, 1.2)
    assert not wait.lasts(1.0, 2.0), "a moment ago"
    assert wait.lasts(1.0, 2.3)
    wait.number = 2
    assert not wait.lasts(1.0, 9.0), "another one"
    wait.peer = NOBODY
    assert not wait.lasts(1.0, 19.0)


def test_whoever_is_waited_for_on_links_beside_is_prodded_too() -> None:
    """What is not acknowledged ends a silent connection, whichever thread waits for it."""
    own, beside, now, prodded = OpenWait(), OpenWait(peer=3, number=1), 100.0, list[int]()
    for seconds in (0.0, 0.7, 0.1, 0.35, 0.45):
        now += seconds
        prodded += long_awaited([own, beside], lambda: False, now)
    assert prodded == [3, 3]
    own.peer, own.number = 2, 1
    for seconds in (0.05, 0.8):
        now += seconds
        prodded += long_awaited([own, beside], lambda: False, now)
    assert sorted(prodded[2:]) == [2, 3]


def test_whoever_is_waited_for_is_prodded_when_connections_were_closed() -> None:
    asked: list[bool] = []
    waits, closed = [OpenWait(), OpenWait()], lambda: bool(asked.append(True) or True)  # type: ignore[func-returns-value]
    assert list(long_awaited(waits, closed, 1.0)) == []
    assert asked == []
    waits[1].peer = 3
    assert list(long_awaited(waits, closed, 1.0)) == [3]


def test_nobody_is_prodded_where_nobody_waits_any_more() -> None:
    """A wait that is about to begin has a new number before it has a peer."""
    wait = OpenWait(peer=2, number=1)
    assert not wait.lasts(0.5, 0.0)
    wait.peer = NOBODY
    wait.number = 2
    wait.peer = 3
    assert not wait.lasts(0.5, 9.0)


def while_it_stands_still(path: str) -> None:
    """Rank 1 is held up where its other threads are, too; rank 0 waits for it in two orders, and then sends much."""
    transport = peer_to_peer(path)
    beside, large = transport.open_channel(), np.zeros(1 << 24, dtype=np.uint8)
    if transport.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        for links in (transport, beside):
            links.send(0, conformance.place()).wait()
        for links in (transport, beside):
            links.receive(0, large).wait()
    else:
        pendings = [links.receive(1, conformance.place()) for links in (transport, beside)]
        threads = [threading.Thread(target=pending.wait, daemon=True) for pending in pendings]
        for thread in threads:
            thread.start()
        say("waits")
        for thread in threads:
            thread.join()
        sent = [links.send(1, large) for links in (transport, beside)]
        for _ in range(20):
            assert not transport.has_lost(1, or_left=False)  # asked with much under way
        for pending in sent:
            pending.wait()
    transport.close()


def test_asking_whether_a_peer_is_there_holds_up_nothing() -> None:
    """A message that Gloo has to send when its work is gone would stop all that comes after it."""
    with store_file() as path, Team(2) as team:
        team.start(while_it_stands_still, path)
        assert team.hear(0) == "waits"
        time.sleep(2.5)  # two looks of the listener's find that it waits for long
        team.kill(1, signal.SIGCONT)
        outcomes = team.finish()
    assert all(outcome.ok for outcome in outcomes), outcomes


def test_a_connection_that_was_closed_is_seen_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, watched_connections() as opened:
        client = socket.create_connection(server.getsockname())
    with client:
        assert not opened.some_closed()
        number = client.fileno()
    with open(os.devnull) as other:
        os.dup2(other.fileno(), number)  # it has come again
        try:
            assert opened.some_closed()
            assert not opened.some_closed()
        finally:
            os.close(number)


# ------------------------------------------------------------------------------------------------ deaths


def wait_for_the_left(path: str) -> LinkFailure:
    """Wait for the neighbour, which waits for its own, all the way round."""
    transport = peer_to_peer(path)
    pending = transport.receive((transport.rank - 1) % transport.size, conformance.place())
    say("ready")
    try:
        with pytest.raises(LinkError) as raised:
            pending.wait()
        return raised.value.cause
    finally:
        transport.close()


def dies_while_others_connect(path: str) -> LinkFailure | None:
    """Rank 1 dies when the first of its two groups stands."""
    here = place()
    if here.rank == 1:
        store = dist.PrefixStore("data", dist.PrefixStore(f"{here.job}/", dist.FileStore(path, -1)))
        dist.ProcessGroupGloo(store, 1, 2, datetime.timedelta(seconds=30))
        os._exit(7)
    with pytest.raises(LinkError) as raised:
        peer_to_peer(path, joining_s=1.0)
    return raised.value.cause


def test_a_death_while_the_connections_are_made_is_an_error_of_the_link() -> None:
    with store_file() as path:
        alive, died = outcomes_of(2, dies_while_others_connect, path)
    assert died.exit_status == 7
    assert alive.value == LinkFailure("lost", NOBODY), alive.trace


def test_everybody_hears_who_died() -> None:
    with store_file() as path, Team(4) as team:
        team.start(wait_for_the_left, path)
        team.await_word()
        team.kill(2)
        outcomes = team.finish()
    assert outcomes[2].exit_status == -signal.SIGKILL
    for rank in (0, 1, 3):
        assert outcomes[rank].value == LinkFailure("lost", 2)


def waits_while_another_connection_breaks(path: str) -> LinkFailure:
    """Each waits for the other on one of two connections, and the other one breaks."""
    transport = peer_to_peer(path)
    with watched_connections() as opened:
        beside = transport.open_channel(1)
    received = conformance.place()
    arrival = beside.receive(1 - transport.rank, received)
    beside.send(1 - transport.rank, conformance.message(transport.rank)).wait()
    arrival.wait()
    assert (received == conformance.message(1 - transport.rank)).all()
    say("ready")
    hear()
    if transport.rank == 0:
        for number, _ in opened.sockets:
            with socket.socket(fileno=os.dup(number)) as sock, contextlib.suppress(OSError):
                sock.getpeername()  # not one that listens
                sock.shutdown(socket.SHUT_RDWR)
    return conformance.heard(transport, 1 - transport.rank)


def test_a_link_fails_with_any_of_its_connections() -> None:
    with store_file() as path, Team(2) as team:
        team.start(waits_while_another_connection_breaks, path)
        team.await_word()
        for rank in (0, 1):
            team.tell(rank, "go")
        outcomes = team.finish()
    for outcome in outcomes:
        assert outcome.value is not None, outcome.trace
        assert outcome.value.kind == "lost"


def adds_a_connection(path: str, how: str, timeout_s: float) -> LinkFailure | None:
    """All ranks are about to have one more connection; the last one does not come, dies, or cannot make any."""
    transport = peer_to_peer(path, timeout_s=timeout_s)
    transport.doing = "connecting"
    say("ready")
    if transport.rank == transport.size - 1:
        hear()
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "does not come":
            transport.doing = ""
            hear()
            return None
    try:
        with pytest.MonkeyPatch.context() as patch:
            if how in REFUSED and transport.rank == transport.size - 1:
                patch.setattr(dist, "ProcessGroupGloo", functools.partial(refuse, how))
            with pytest.raises(LinkError) as raised:
                transport.open_channel(1)
        return raised.value.cause
    finally:
        transport.close()


REFUSED = ("socket: Too many open files", "Connection closed by peer")
"""What Gloo says where descriptors have run out: here, or at a peer that lives and does not know."""


def refuse(text: str, *_: Any) -> None:
    raise RuntimeError(text)


@pytest.mark.parametrize(
    ("how", "kind", "timeout_s"),
    [
        ("does not come", "late", 1.0),
        ("dies", "lost", FAR_S),
        *(pytest.param(text, "left", 6.0, marks=pytest.mark.thorough) for text in REFUSED),
    ],
)
def test_a_connection_that_cannot_be_added_is_an_error_of_the_rank_it_fails_by(
    how: str, kind: Any, timeout_s: float
) -> None:
    with store_file() as path, Team(3) as team:
        team.start(adds_a_connection, path, how, timeout_s)
        team.await_word()
        team.tell(2, "go")
        for rank in (0, 1):
            outcome = team.finish_one(rank)
            assert outcome.value == LinkFailure(kind, 2), outcome.trace
        if how == "does not come":
            team.tell(2, "go")
        last = team.finish_one(2)
        if how in REFUSED:
            assert last.value == LinkFailure("left", 2), last.trace
            assert last.value.detail == how


def gives_up_while_words_take_long(path: str) -> LinkFailure | None:
    transport = peer_to_peer(path)
    if transport.rank == 0:
        say("ready")
        hear()
        transport.fail(LinkFailure("left", 0))
        hear()  # it lives, or its other connection would be closed, too
        return None
    asked: list[float] = []

    def nothing_at_first(read: Callable[..., AbortNotice | None]) -> Callable[..., AbortNotice | None]:
        """As where the thread that takes words from the network has no processor for a second."""

        def look(words: AbortChannel, *how: Any) -> AbortNotice | None:
            asked.append(time.monotonic())
            time.sleep(0.002)
            return read(words, *how) if asked[-1] - asked[0] > 1.0 else None

        return look

    with pytest.MonkeyPatch.context() as patch:
        say("ready")
        for name in ("first", "of"):
            patch.setattr(AbortChannel, name, nothing_at_first(getattr(AbortChannel, name)))
        with pytest.raises(LinkError) as caught:
            transport.receive(0, np.zeros(8, np.uint8)).wait()
    return caught.value.cause


def test_who_closes_a_connection_on_purpose_is_not_taken_for_dead_before_its_word_has_come() -> None:
    with store_file() as path, Team(2) as team:
        team.start(gives_up_while_words_take_long, path)
        team.await_word()
        team.tell(0, "give up")
        heard = team.finish_one(1)
        team.tell(0, "go")
        team.finish_one(0)
    assert heard.value == LinkFailure("left", 0), heard.trace


def with_a_message_half_way(path: str, way: str, timeout_s: float) -> LinkFailure:
    """A large message is half way to or from rank 1 when that dies; rank 2 waits for rank 0, which waits for rank 1."""
    transport = peer_to_peer(path, timeout_s=timeout_s)
    large = np.zeros(1 << 28, dtype=np.uint8)
    large[0] = transport.rank == 0
    if transport.rank == 1:
        say("ready")
        hear()
        pending = transport.send(0, large) if way == "from" else transport.receive(0, large)
        while way == "to" and large[0] == 0:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)
    elif transport.rank == 0:
        pending = transport.receive(1, large) if way == "from" else transport.send(1, large)
    else:
        pending = transport.receive(0, conformance.place())
    say("ready")
    try:
        with pytest.raises(LinkError) as raised:
            pending.wait()
        return raised.value.cause
    finally:
        transport.close()


@pytest.mark.parametrize("way", ["from", "to"])
def test_a_death_with_a_message_half_way(way: str) -> None:
    """Gloo forgets who waits for such a message, and its own timeout may be half an hour away."""
    with store_file() as path, Team(3) as team:
        team.start(with_a_message_half_way, path, way, FAR_S)
        team.await_word()
        if way == "from":  # who receives stands still, so no more arrives than the connection holds
            team.kill(0, signal.SIGSTOP)
        team.tell(1, "die")
        assert team.finish_one(1).exit_status == -signal.SIGKILL
        team.kill(0, signal.SIGCONT)
        for rank in (0, 2):
            outcome = team.finish_one(rank)
            assert outcome.value == LinkFailure("lost", 1), outcome.trace


def wait_in_a_chain(path: str, absent: int) -> LinkFailure | None:
    """Everybody waits for the next higher rank, but one: it is busy with something else."""
    transport = peer_to_peer(path, timeout_s=1.0)
    try:
        if transport.rank == absent:
            hear()
            return None
        transport.doing = "waiting"
        return conformance.heard(transport, (transport.rank + 1) % transport.size)
    finally:
        transport.close()


@pytest.mark.parametrize("absent", [0, 3])
def test_the_late_one_is_named_and_not_its_neighbour(absent: int) -> None:
    with store_file() as path, Team(4) as team:
        team.start(wait_in_a_chain, path, absent)
        for rank in {0, 1, 2, 3} - {absent}:
            assert team.finish_one(rank).value == LinkFailure("late", absent)
        team.tell(absent, "go on")
        assert team.finish_one(absent).ok


def while_another_wait_is_over(path: str) -> LinkFailure | None:
    """Rank 1 waits for rank 0 while another wait's time is over, which breaks every connection of the group."""
    groups, gloo = [], dist.ProcessGroupGloo
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupGloo", lambda *how: groups.append(gloo(*how)) or groups[-1])
        transport = peer_to_peer(path)
    if transport.rank == 0:
        say("ready")
        hear()
        return None
    say("ready")
    over = threading.Timer(0.5, close_connections, [groups[0]])
    over.start()
    with pytest.raises(LinkError) as caught:
        transport.receive(0, conformance.place()).wait()
    over.join()
    return caught.value.cause


def test_where_another_wait_is_over_the_peer_is_late_and_not_lost() -> None:
    """The listener, or another thread, may be the first to see that Gloo has closed everything."""
    with store_file() as path, Team(2) as team:
        team.start(while_another_wait_is_over, path)
        team.await_word()
        heard = team.finish_one(1)
        team.tell(0, "go")
        team.finish_one(0)
    assert heard.value == LinkFailure("late", 0), heard.trace


def wait_in_a_circle(path: str, what: list[str]) -> LinkFailure:
    transport = peer_to_peer(path, timeout_s=0.5)
    transport.doing = what[transport.rank]
    try:
        return conformance.heard(transport, (transport.rank + 1) % transport.size)
    finally:
        transport.close()


def test_waiting_in_a_circle_means_that_they_do_different_things() -> None:
    with store_file() as path:
        for cause in on_ranks(4, wait_in_a_circle, path, ["ring", "ring", "tree", "ring"]):
            assert cause == LinkFailure("disagreed", 2)
            assert cause.detail == "ranks 0, 1 and 3 called ring; rank 2 called tree"


# ------------------------------------------------------------------------------------------------ leaks


def descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def open_and_close(path: str, times: int) -> list[tuple[int, int]]:
    seen = []
    for k in range(times):
        transport = peer_to_peer(path, name=str(k))
        conformance.in_order(transport)
        transport.close()
        del transport
        seen.append(descriptors_and_threads())
    return seen


def test_nothing_grows() -> None:
    with store_file() as path:
        for seen in on_ranks(2, open_and_close, path, 6):
            assert seen[-1] <= seen[1], f"descriptors and threads after each: {seen}"

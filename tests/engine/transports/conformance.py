"""What every transport must do. Each check is carried out by all vertices at once, each with its own end.

`CHECKS` names them; `check(name, transport)` runs one on this vertex. The last of a group's checks may leave it
unusable (`FAILURES`), so each of those gets a group of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ringside.engine.transports.base import LinkError, LinkFailure, Links, Transport

Array = np.ndarray[Any, Any]


def message(*numbers: int, size: int = 16) -> Array:
    """Bytes that tell who wrote them."""
    return np.random.default_rng(numbers).integers(0, 256, size, dtype=np.uint8)


def place(size: int = 16) -> Array:
    return np.zeros(size, dtype=np.uint8)


def others(t: Transport) -> list[int]:
    return [peer for peer in range(t.size) if peer != t.rank]


def in_order(t: Transport) -> None:
    """Messages of a pair arrive in the order in which they were sent, wherever their places were posted."""
    for posted_first in (True, False):
        sizes = [1 + 37 * k for k in range(20)]
        places = {peer: [place(size) for size in sizes] for peer in others(t)}
        receives = []
        if posted_first:
            receives = [t.receive(peer, into) for peer in others(t) for into in places[peer]]
        sends = [
            t.send(peer, message(t.rank, peer, k, size=size)) for k, size in enumerate(sizes) for peer in others(t)
        ]
        if not posted_first:
            receives = [t.receive(peer, into) for peer in others(t) for into in places[peer]]
        for pending in (*receives, *sends):
            pending.wait()
        for peer in others(t):
            for k, size in enumerate(sizes):
                assert (places[peer][k] == message(peer, t.rank, k, size=size)).all(), f"message {k} of {peer}"


def waited_for_in_any_order(t: Transport) -> None:
    """The last of several messages may be waited for first."""
    for peer in others(t):
        places = [place() for _ in range(5)]
        receives = [t.receive(peer, into) for into in places]
        sends = [t.send(peer, message(t.rank, k)) for k in range(5)]
        for pending in reversed(receives):
            pending.wait()
        for pending in reversed(sends):
            pending.wait()
        for k, into in enumerate(places):
            assert (into == message(peer, k)).all()


def shorter_than_its_place(t: Transport) -> None:
    """What lies behind a short message is left alone, and the next message goes to the next place."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    places = [place(1000), place(1000)]
    receives = [t.receive(left, into) for into in places]
    for k, size in enumerate((1, 999)):
        t.send(right, message(t.rank, k, size=size)).wait()
    for pending in receives:
        pending.wait()
    for k, (size, into) in enumerate(zip((1, 999), places, strict=True)):
        assert (into[:size] == message(left, k, size=size)).all()
        assert not into[size:].any()


def part_of_an_array(t: Transport) -> None:
    """Messages are sent from the middle of an array and received into one."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    source, target = message(t.rank, size=100), place(100)
    receive = t.receive(left, target[20:50])
    t.send(right, source[33:63]).wait()
    receive.wait()
    assert (target[20:50] == message(left, size=100)[33:63]).all()
    assert not target[:20].any()
    assert not target[50:].any()


def many_to_one(t: Transport) -> None:
    """Everybody sends to everybody in turn."""
    for root in range(t.size):
        if t.rank != root:
            for k in range(10):
                t.send(root, message(t.rank, k)).wait()
            continue
        places = {peer: [place() for _ in range(10)] for peer in others(t)}
        receives = [t.receive(peer, into) for peer in others(t) for into in places[peer]]
        for pending in receives:
            pending.wait()
        for peer, got in places.items():
            assert all((into == message(peer, k)).all() for k, into in enumerate(got))


def large_both_ways(t: Transport) -> None:
    """Neighbours send each other more than any buffer holds, both at once."""
    size = (3 << 20) + 7
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    targets = {peer: place(size) for peer in {right, left}}
    receives = [t.receive(peer, into) for peer, into in targets.items()]
    sends = [t.send(peer, message(t.rank, peer, size=size)) for peer in targets]
    for pending in (*receives, *sends):
        pending.wait()
    for peer, into in targets.items():
        assert (into == message(peer, t.rank, size=size)).all()


def memory_may_go(t: Transport) -> None:
    """A sender may use its memory again when the message has left; nobody has to keep it alive for the transport."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    target = place(5000)
    for k in range(20):
        receive = t.receive(left, target)
        data = message(t.rank, k, size=5000)
        send = t.send(right, data)
        del data
        send.wait()
        receive.wait()
        assert (target == message(left, k, size=5000)).all()


def tells_where_it_is(t: Transport) -> None:
    assert 0 <= t.rank < t.size
    assert t.describe()["transport"]


def beside_each_other(t: Transport) -> None:
    """Messages of links beside these have an order of their own, whichever are sent, or have places, first."""
    right, left = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for other in (t.open_channel(), t.open_channel(2), t.open_channel(1)):
        in_two_orders(t, other, left, right)


def in_two_orders(t: Transport, other: Links, left: int, right: int) -> None:
    """Exchange messages of a transport and of links beside it with two neighbours."""
    places = {(which, k): place() for which in (0, 1) for k in range(3)}
    receives = [other.receive(left, places[1, k]) for k in range(3)]
    sends = [t.send(right, message(t.rank, 0, k)) for k in range(3)]
    sends += [other.send(right, other.keep(message(t.rank, 1, k))) for k in range(3)]
    for pending in receives:  # though those of `t` were sent before
        pending.wait()
    receives = [t.receive(left, places[0, k]) for k in range(3)]
    for pending in (*receives, *sends):
        pending.wait()
    for (which, k), into in places.items():
        assert (into == message(left, which, k)).all(), f"message {k} of order {which}"


CHECKS: dict[str, Callable[[Transport], None]] = {
    check.__name__: check
    for check in (
        in_order,
        waited_for_in_any_order,
        shorter_than_its_place,
        part_of_an_array,
        many_to_one,
        large_both_ways,
        memory_may_go,
        beside_each_other,
        tells_where_it_is,
    )
}


# ------------------------------------------------------------------------------------------------ failures


def heard(t: Transport, peer: int) -> LinkFailure:
    """The cause with which a wait for a peer ends."""
    with pytest.raises(LinkError) as raised:
        t.receive(peer, place()).wait()
    return raised.value.cause


def leaving_is_heard(t: Transport) -> None:
    """Whoever waits for one that closes, or for one that waits for it, hears who left."""
    if t.rank == 0:
        t.close(patience_s=0.1)
        return
    assert heard(t, t.rank - 1) == LinkFailure("left", 0)
    assert t.fail(LinkFailure("left", t.rank)) == LinkFailure("left", 0)


def first_cause_counts(t: Transport) -> None:
    """What one vertex finds wrong is what all are told, whatever they find themselves because of it."""
    if t.rank == t.size - 1:
        assert t.fail(LinkFailure("disagreed", t.rank, "it was called something else")) == LinkFailure(
            "disagreed", t.rank
        )
    else:
        cause = heard(t, t.rank + 1)
        assert cause == LinkFailure("disagreed", t.size - 1)
        assert cause.detail == "it was called something else"
    assert t.fail(LinkFailure("left", t.rank)) == LinkFailure("disagreed", t.size - 1)


def nothing_works_afterwards(t: Transport) -> None:
    """A group that failed raises at once, at every call and on every thread."""
    t.fail(LinkFailure("left", t.rank))
    peer = others(t)[0]
    for call in (lambda: t.send(peer, message(1)).wait(), lambda: t.receive(peer, place()).wait()):
        with pytest.raises(LinkError):
            call()


def what_had_arrived_stays(t: Transport) -> None:
    """Messages that were sent before their sender left are not lost with it."""
    size = 100_000
    if t.rank == 0:
        places = {peer: [place(size) for _ in range(3)] for peer in others(t)}
        receives = [t.receive(peer, into) for peer in others(t) for into in places[peer]]
        for pending in receives:
            pending.wait()
        for pending in [t.send(peer, message(0)) for peer in others(t)]:
            pending.wait()
        for peer, got in places.items():
            assert all((into == message(peer, k, size=size)).all() for k, into in enumerate(got))
    else:
        answer = place()
        receive = t.receive(0, answer)
        for pending in [t.send(0, message(t.rank, k, size=size)) for k in range(3)]:
            pending.wait()
        receive.wait()
        assert (answer == message(0)).all()
    t.close()


def closing_with_places_posted(t: Transport) -> None:
    """Leaving while receives are posted and messages are under way neither waits nor crashes, and may be repeated."""
    pending = []
    with contextlib.suppress(LinkError):  # another may have left already
        pending += [t.receive(peer, place(1 << 20)) for peer in others(t) for _ in range(8)]
        pending += [t.send((t.rank + 1) % t.size, message(t.rank, size=1 << 20))]
    t.close()
    t.close()
    for one in pending:
        with contextlib.suppress(LinkError):  # some may have arrived
            one.wait()


def beside_it_nothing_works_afterwards(t: Transport) -> None:
    """Who waits on links beside those that fail hears of it, and of the same cause."""
    beside, peer = [t.open_channel(), t.open_channel(1)], others(t)[-1]
    if t.rank == 0:
        t.fail(LinkFailure("left", 0))
    for other in beside:
        with pytest.raises(LinkError) as raised:
            other.receive(peer, place()).wait()
        assert raised.value.cause == LinkFailure("left", 0)
        with pytest.raises(LinkError):
            other.send(peer, message(1)).wait()


FAILURES: dict[str, Callable[[Transport], None]] = {
    check.__name__: check
    for check in (
        leaving_is_heard,
        first_cause_counts,
        nothing_works_afterwards,
        beside_it_nothing_works_afterwards,
        what_had_arrived_stays,
        closing_with_places_posted,
    )
}

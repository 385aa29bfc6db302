"""Rounds kept apart: where it costs nothing, there only; then nobody sends ahead, and results are what they were."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from tests.support.thread_transport import Threads

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.message_size import rounds_apart
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.reduction import Reduction
from ringside.schedule import ALGORITHMS, by_name, pipelined, run

from .oracle import difference, elements
from .threaded import on_threads as engine_threads
from .transports.schedules import run_schedule
from .transports.vertices import on_threads

FULL = 32


def segments(name: str, ranks: int) -> tuple[int, ...]:
    s = by_name(name, ranks)
    return (max(FULL // s.chunks, 1),) * s.chunks


@pytest.mark.parametrize("ranks", range(2, 18))
def test_the_exchanges_of_a_power_of_two_are_kept_apart_and_nothing_else_is(ranks: int) -> None:
    power = ranks > 2 and ranks & (ranks - 1) == 0
    for name in sorted(set(ALGORITHMS) - {"hierarchical", "halving_doubling", "recursive_doubling"}):
        assert not rounds_apart(by_name(name, ranks), segments(name, ranks)), name
    for name in ("halving_doubling", "recursive_doubling"):
        assert rounds_apart(by_name(name, ranks), segments(name, ranks)) == power, name


def test_pipelines_are_not_kept_apart() -> None:
    for name in ("tree", "two_tree", "chain", "halving_doubling"):
        s = pipelined(by_name(name, 8), 32)
        assert not rounds_apart(s, (4,) * s.chunks), name


def test_rounds_of_few_messages_are_not_kept_apart() -> None:
    """What passes between two rounds is a message's way; of one or two messages it is as long as they are."""
    s = by_name("recursive_doubling", 8)
    assert [rounds_apart(s, (count,)) for count in (1, 3, 4, 64)] == [False, False, True, True]
    s = by_name("halving_doubling", 8)
    assert not rounds_apart(s, (1,) * 8)
    assert rounds_apart(s, (2,) * 8)


def test_a_schedule_of_very_many_rounds_is_not_looked_through() -> None:
    assert not rounds_apart(by_name("chain", 200), (4,))


@pytest.mark.parametrize("name", ["halving_doubling", "recursive_doubling"])
@pytest.mark.parametrize("ordered", [True, False])
def test_nobody_sends_of_a_round_before_all_of_those_before_it_have_come(
    name: str, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where rounds are not kept apart, the same calls do send ahead."""
    size, count = 4, 1 << 17
    ahead, guard = [0] * size, threading.Lock()
    send = ExchangeRun._send

    def noted(self: ExchangeRun, queue: Any, parts: Any) -> None:
        before = sum(len(receives) for receives in self.plan.rounds[: _round_of(self, queue.peer, parts)])
        due = [
            done < len(self.segments[receive.chunk])
            for done, receive in zip(self.done, (r for rs in self.plan.rounds for r in rs), strict=True)
        ]
        with guard:
            ahead[self.me] += any(due[:before])
        send(self, queue, parts)

    monkeypatch.setattr(ExchangeRun, "_send", noted)

    def vertex(end: Threads) -> Any:
        x = elements("float32", count, end.rank)
        run_schedule(Exchange(end, segment_bytes=1 << 14), by_name(name, size), x, ordered=ordered)
        return x

    found = on_threads(size, vertex)
    inputs = np.stack([elements("float32", count, rank) for rank in range(size)])
    with np.errstate(all="ignore"):
        want = run(by_name(name, size), inputs)
    for rank in range(size):
        assert not difference(found[rank], want[rank], "float32")
    if ordered:
        assert ahead == [0] * size
    else:
        assert min(ahead) > 0


def _round_of(run: ExchangeRun, peer: int, parts: Any) -> int:
    """The round of a message: that of the send to this peer that carries the chunk after that receive."""
    chunk, _, after = parts[0]
    return next(send.round for send in run.plan.links[peer] if (send.chunk, send.after) == (chunk, after))


@pytest.mark.parametrize(("name", "size"), [("halving_doubling", 8), ("recursive_doubling", 8), ("hierarchical", 8)])
def test_results_are_what_they_were_and_any_number_of_places_is_enough(name: str, size: int) -> None:
    count = 1 << 18

    for window in (1, 4):

        def vertex(end: Threads, window: int = window) -> Any:
            exchange, found = Exchange(end, segment_bytes=1 << 14, window=window), []
            for at in range(3):  # one behind the other: who is early meets who is late
                x = elements("float32", count, end.rank + at)
                run_schedule(exchange, by_name(name, size), x, ordered=True)
                found.append(x)
            return found

        results = on_threads(size, vertex)
        for at in range(3):
            inputs = np.stack([elements("float32", count, rank + at) for rank in range(size)])
            with np.errstate(all="ignore"):
                want = run(by_name(name, size), inputs)
            for rank in range(size):
                assert not difference(results[rank][at], want[rank], "float32")


def test_a_tensor_that_is_added_up_piece_by_piece_goes_round_by_round_too(monkeypatch: pytest.MonkeyPatch) -> None:
    size, count = 4, 1 << 20
    reached, guard, over = list[int](), threading.Lock(), threading.Barrier(size)
    reach = ExchangeRun._enter_round

    def noted(self: ExchangeRun, k: int) -> None:
        with guard:
            if self.feed is not None and self.round < k <= self.plan.schedule.rounds:
                reached.append(k)
        reach(self, k)

    monkeypatch.setattr(ExchangeRun, "_enter_round", noted)

    def job(engine: HierarchicalEngine) -> Any:
        x = elements("float32", count, engine.rank_map.rank)
        choice = AlgorithmSpec("halving_doubling", "hosts")
        engine.all_reduce(address_of(x), count, Reduction(0, 0), choice)
        over.wait(60.0)
        engine.close()
        return x

    found = engine_threads(size, job)
    inputs = np.stack([elements("float32", count, rank) for rank in range(size)])
    with np.errstate(all="ignore"):
        want = run(by_name("halving_doubling", size), inputs)
    for rank in range(size):
        assert not difference(found[rank], want[rank], "float32")
    assert sorted(reached) == sorted([1, 2, 3] * size)

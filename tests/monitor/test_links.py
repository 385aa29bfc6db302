"""Wire per link: from two looks at a connection to records with peers, and which link is slow."""

from __future__ import annotations

import itertools
import socket
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.waiting import Clock

from ringside.monitor.links.sampler import (
    LEAST_BYTES,
    PERIOD_S,
    LinkLedger,
    LinkMap,
    LinkSampler,
    TcpConnection,
    TcpCounters,
    has_tcp_info,
    read_counters,
    wires_by_link,
)
from ringside.monitor.links.watcher import LEARNT, SETTLING, LinkWatcher
from ringside.monitor.run.records import Row, StepRecord, Wire

from .jobs import opened, row, watch

Link = tuple[int, int]
MB = 1_000_000


def record(rank: int, step: int = 0, wires: Iterable[Wire] = (), **fields: Any) -> StepRecord:
    return StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=1, own_seconds=1, wires=tuple(wires), **fields)


def connection(acked: int, busy: float, *, window: float = 0.0, received: int = 0, inode: int = 7) -> TcpConnection:
    counters = TcpCounters(acked, received, busy, window, 0.0, 1e-3, 0)
    return TcpConnection(inode, f"10.0.0.1 {40_000 + inode}", "10.0.0.2 5000", counters)


def test_who_connects_anew_for_everything_fills_no_memory() -> None:
    known = LinkMap(ends_kept=100)
    early = Wire(seconds=1, sent_bytes=MB, wire_seconds=1, local="10.0.0.1 9", remote="10.0.0.2 1")
    late = msgspec.structs.replace(early, local="10.0.0.1 8")
    known.resolve(record(3, 0, [early]))
    kept = Wire(seconds=1, sent_bytes=MB, wire_seconds=1, local="10.0.0.1 1", remote="10.0.0.2 1")
    for port in range(1_000):
        passing = msgspec.structs.replace(kept, local=f"10.0.0.1 {1000 + port}", remote="8.8.8.8 443")
        known.resolve(record(0, port, [kept, passing]))
    known.resolve(record(3, 0, [late]))
    to_both = [msgspec.structs.replace(early, local="10.0.0.2 1", remote=f"10.0.0.1 {port}") for port in (8, 9)]
    peers = [wire.peer for wire in known.resolve(record(1, 0, to_both)).wires]
    assert peers == [3, 0], "the one that is forgotten is taken for the lowest rank of its address"
    back = msgspec.structs.replace(kept, local="10.0.0.2 1", remote="10.0.0.1 1")
    assert known.resolve(record(1, 0, [back])).wires[0].peer == 0


# ------------------------------------------------------------------------------------------------ sampling


def test_what_was_sent_is_the_difference_between_two_looks() -> None:
    clock, seen = Clock(), [connection(5 * MB, 1.0)]
    sampler = LinkSampler(lambda: seen, now=clock, cpu=lambda: 0.0)
    assert sampler.sample() == ()
    clock.now += PERIOD_S / 2
    assert sampler.sample() == ()
    clock.now += PERIOD_S
    seen[:] = [connection(25 * MB, 1.9, window=0.4)]
    (wire,) = sampler.sample()
    assert (wire.sent_bytes, wire.seconds) == (20 * MB, 1.5 * PERIOD_S)
    assert (wire.wire_seconds, wire.window_seconds) == (pytest.approx(0.5), pytest.approx(0.4))
    assert wire.bytes_per_s == pytest.approx(40 * MB)
    assert (wire.local, wire.remote, wire.peer) == ("10.0.0.1 40007", "10.0.0.2 5000", -1)


def test_only_the_newest_record_of_a_batch_carries_wires() -> None:
    clock, seen = Clock(), [connection(0, 0.0)]
    sampler = LinkSampler(lambda: seen, now=clock, cpu=lambda: 0.0)
    batch = [record(0, 1), record(0, 2)]
    assert sampler.add_to(batch) == batch
    clock.now += 2 * PERIOD_S
    seen[:] = [connection(MB, 0.1)]
    first, second = sampler.add_to(batch)
    assert (len(first.wires), len(second.wires)) == (0, 1)
    clock.now += 2 * PERIOD_S
    assert sampler.add_to([]) == []


def test_connections_that_carry_little_are_left_out_and_those_that_only_receive_are_told() -> None:
    clock = Clock()
    seen = [connection(0, 0.0, inode=1), connection(0, 0.0, inode=2), connection(0, 0.0, inode=3)]
    sampler = LinkSampler(lambda: seen, now=clock, cpu=lambda: 0.0)
    sampler.sample()
    clock.now += PERIOD_S
    seen[:] = [
        connection(LEAST_BYTES - 1, 0.1, inode=1),
        connection(0, 0.0, received=MB, inode=2),
        connection(2 * MB, 0.1, inode=3),
        connection(9 * MB, 0.1, inode=4),  # opened meanwhile
    ]
    assert [wire.sent_bytes for wire in sampler.sample()] == [2 * MB, 0]


def test_looking_at_thousands_of_connections_is_done_less_often() -> None:
    clock = Clock()
    spent = iter(np.arange(0.0, 100.0, 0.05).tolist())  # 50 ms a look
    looks = []
    sampler = LinkSampler(lambda: looks.append(clock.now) or [connection(0, 0.0)], now=clock, cpu=lambda: next(spent))  # type: ignore[func-returns-value]
    for _ in range(100):
        sampler.sample()
        clock.now += 1.0
    assert len(looks) == 4  # every 25 s: 0.2% of a core


def test_a_look_that_fails_is_the_last_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> list[TcpConnection]:
        raise PermissionError("no")

    sampler = LinkSampler(broken, now=Clock(), cpu=lambda: 0.0)
    batch = [record(0, 1)]
    assert sampler.add_to(batch) == batch
    assert sampler.add_to(batch) == batch
    assert [line.message for line in caplog.records if "links" in line.message] == [
        "links are not watched any more (PermissionError: no); training goes on"
    ]


# ------------------------------------------------------------------------------------------------ who is who


def test_peers_are_found_by_what_they_call_their_own_end() -> None:
    links = LinkMap()
    to_one = Wire(seconds=1, sent_bytes=MB, wire_seconds=0.1, local="10.0.0.1 4000", remote="10.0.0.2 5000")
    back = Wire(seconds=1, sent_bytes=0, wire_seconds=0.0, local="10.0.0.2 5000", remote="10.0.0.1 4000")
    assert links.resolve(record(0, wires=[to_one])).wires[0].peer == -1
    assert links.resolve(record(3, wires=[back])).wires[0].peer == 0
    assert wires_by_link(links.resolve(record(0, wires=[to_one]))).keys() == {(0, 3)}


def test_an_end_that_nobody_called_its_own_is_taken_for_the_lowest_rank_of_its_host() -> None:
    links = LinkMap()
    for rank in (5, 4):
        links.resolve(record(rank, wires=[Wire(seconds=1, sent_bytes=1, wire_seconds=0, local=f"10.0.0.2 {rank}")]))
    stranger = Wire(seconds=1, sent_bytes=MB, wire_seconds=0.1, local="10.0.0.1 1", remote="10.0.0.2 99")
    assert links.resolve(record(0, wires=[stranger])).wires[0].peer == 4


def test_every_end_that_was_told_of_is_remembered() -> None:
    links = LinkMap()
    for rank in range(1, 40):
        links.resolve(record(rank, wires=[Wire(seconds=1, sent_bytes=1, wire_seconds=0, local=f"10.0.0.9 {rank}")]))
    all_of_them = [
        Wire(seconds=1, sent_bytes=1, wire_seconds=0, local=f"10.0.1.1 {rank}", remote=f"10.0.0.9 {rank}")
        for rank in range(1, 40)
    ]
    assert [wire.peer for wire in links.resolve(record(0, wires=all_of_them)).wires] == list(range(1, 40))


def test_outsiders_are_nobodys_link() -> None:
    outside = Wire(seconds=1, sent_bytes=MB, wire_seconds=0.1, local="10.0.0.1 1", remote="192.0.2.1 443")
    assert wires_by_link(LinkMap().resolve(record(0, wires=[outside]))) == {}


def test_a_ledger_adds_up_and_keeps_few_rates() -> None:
    ledger = LinkLedger()
    wire = Wire(seconds=1.0, sent_bytes=10 * MB, wire_seconds=0.5, peer=1)
    slow = Wire(seconds=1.0, sent_bytes=1 * MB, wire_seconds=0.5, peer=2, retransmitted_bytes=3)
    records = [record(0, step, [wire, slow]) for step in range(1_000)]
    assert list(ledger.reading(records)) == records
    first, second = ledger.totals()
    assert ((first.src, first.dst), (second.src, second.dst)) == ((0, 2), (0, 1))
    assert (first.bytes_per_s, second.bytes_per_s) == (2 * MB, 20 * MB)
    assert (second.sent_bytes, second.wire_ratio, first.retransmitted_bytes) == (10_000 * MB, 0.5, 3_000)


def test_a_ledger_of_very_many_records_takes_no_more_memory() -> None:
    ledger, one = LinkLedger(), record(0, 0, [Wire(seconds=1.0, sent_bytes=10 * MB, wire_seconds=0.5, peer=1)])

    def read(count: int) -> None:
        for _ in ledger.reading(itertools.repeat(one, count)):
            pass

    read(300)
    tracemalloc.start()
    try:
        read(20_000)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 30_000, "256 rates, and not one of every record"


# ------------------------------------------------------------------------------------------------ which is slow

PERIODS_BEFORE = SETTLING + LEARNT + 8
RING4 = [(0, 1), (1, 2), (2, 3), (3, 0)]
Rate = Callable[[Link, int], float]


def traffic(
    links: list[Link], periods: range, rate: Rate, *, seed: int = 0, noise: float = 0.1, payload: int = 20 * MB
) -> Iterator[Row]:
    """Rows of a job whose links carry the same in every period (a step each), at given rates."""
    random = np.random.default_rng((seed, periods.start))
    ranks = 1 + max(max(link) for link in links)
    for step in periods:
        rates = {link: rate(link, step) * float(np.exp(random.normal(0, noise))) for link in links}
        slowest = min(rates.values())
        one = row(step, ranks, random, own=0.5, exposed=payload / slowest)
        for (src, dst), speed in rates.items():
            # A delayed acknowledgement now and then, as TCP has them; what the others wait is not on their wires.
            wire_s = payload / speed + 0.04 * (random.random() < 0.3)
            delivered = speed if random.random() < 0.7 else 0.1 * speed
            wire = Wire(seconds=1.0, sent_bytes=payload, wire_seconds=wire_s, delivery_bytes_per_s=delivered, peer=dst)
            was = one[src]
            fields = {name: getattr(was, name) for name in was.__struct_fields__}
            one[src] = StepRecord(**{**fields, "wires": (*was.wires, wire)})
        yield one


def healthy(link: Link, step: int) -> float:
    return 100.0 * MB


def test_a_link_that_becomes_slow_is_named_and_so_is_its_end() -> None:
    watcher = LinkWatcher(4)
    assert watch(watcher, traffic(RING4, range(PERIODS_BEFORE), healthy)) == []

    def one_slow(link: Link, step: int) -> float:
        return 20.0 * MB if link == (1, 2) and step < 60 else 100.0 * MB

    found = watch(watcher, traffic(RING4, range(PERIODS_BEFORE, 80), one_slow))
    begun, ended = found
    verdict = begun.verdict
    assert (verdict.kind, verdict.ranks) == ("slow_link", [1, 2])
    assert verdict.since_step == pytest.approx(PERIODS_BEFORE, abs=1)
    assert verdict.detected_step - verdict.since_step <= 4
    assert verdict.evidence["against"] == "its own past"
    assert verdict.excess_ratio == pytest.approx(4.0, rel=0.3)
    assert ended.ended
    assert ended.verdict.evidence["until_step"] == pytest.approx(60, abs=1)
    # 20 MB take 0.8 s longer than at the usual rate, on all four ranks.
    assert ended.verdict.cost_rank_seconds == pytest.approx(4 * 0.8 * (60 - PERIODS_BEFORE), rel=0.2)
    assert watcher.open == []


def test_a_slow_link_is_over_when_it_is_near_its_usual_rate_again_and_not_before() -> None:
    def rate(link: Link, step: int) -> float:
        share = 1.0 if step < 40 or link != (1, 2) else 0.2 if step < 60 else 0.6 if step < 80 else 0.75
        return 100.0 * MB * share

    watcher = LinkWatcher(4)
    assert len(opened(watch(watcher, traffic(RING4, range(60), rate, noise=0.0)))) == 1
    assert watch(watcher, traffic(RING4, range(60, 80), rate, noise=0.0)) == []  # it could carry more
    (ended,) = watch(watcher, traffic(RING4, range(80, 100), rate, noise=0.0))
    assert ended.ended
    assert 80 <= ended.verdict.evidence["until_step"] <= 90


def test_a_link_that_was_never_fast_is_held_against_the_others() -> None:
    (verdict,) = opened(
        watch(LinkWatcher(4), traffic(RING4, range(40), lambda link, _: (10 if link == (3, 0) else 100) * MB))
    )
    assert (verdict.ranks, verdict.evidence["against"]) == ([3, 0], "the other links")


def test_an_interface_that_was_never_fast_is_held_against_links_of_other_hosts() -> None:
    """Half of the links leave through it: with these among the measure, none would be slow."""
    star = [link for peer in range(1, 5) for link in ((0, peer), (peer, 0))]
    rows = traffic(star, range(40), lambda link, _: (30 if link[0] == 0 else 100) * MB, noise=0.0)
    (verdict,) = opened(watch(LinkWatcher(5), rows))
    assert (verdict.ranks[0], verdict.evidence["against"]) == (0, "the other links")


def test_two_hosts_have_only_their_own_past() -> None:
    both = [(0, 1), (1, 0)]
    watcher = LinkWatcher(2)
    steps = traffic(both, range(60), lambda link, step: (100 if step < 30 or link == (1, 0) else 25) * MB)
    (verdict,) = opened(watch(watcher, steps))
    assert verdict.ranks == [0, 1]


def test_an_interface_that_slows_all_its_links_gives_one_verdict() -> None:
    hosts = [f"host{rank}" for rank in range(4)]
    mesh = [(a, b) for a in range(4) for b in range(4) if a != b]
    found = opened(
        watch(
            LinkWatcher(4, hosts),
            traffic(mesh, range(80), lambda link, step: (15 if 2 in link and step >= 30 else 100) * MB),
        )
    )
    (verdict,) = found
    assert 2 in verdict.ranks
    assert "host2" in verdict.cause
    assert "interface" in verdict.advice


def test_where_all_links_are_slower_no_link_is_at_fault() -> None:
    steps = traffic(RING4, range(80), lambda link, step: (100 if step < 30 else 30) * MB)
    assert watch(LinkWatcher(4), steps) == []


def short_messages(steps: range, *, seed: int, slow_from: int = 10**9) -> Iterator[Row]:
    """Rows as recorded of an all-reduce of 1 MB over 1 Gbit/s: two thirds of the wire time is waiting for
    acknowledgements, and the kernel has a rate of its own for half of the periods, now and then a stray one."""
    random = np.random.default_rng(seed)
    for step in steps:
        one = row(step, 2, random, own=0.5, exposed=0.3)
        for src in (0, 1):
            rate = 12.0 * MB if step >= slow_from else 120.0 * MB
            known = random.random() < 0.45
            wire = Wire(
                seconds=1.0,
                sent_bytes=(payload := (5 if step >= slow_from else 29) * MB),
                wire_seconds=payload / rate + payload / (60 * MB) * float(random.uniform(0.8, 1.2)),
                delivery_bytes_per_s=rate * (0.1 if random.random() < 0.15 else 1.0) if known else 0.0,
                peer=1 - src,
            )
            one[src] = msgspec.structs.replace(one[src], wires=(wire,))
        yield one


def test_a_link_whose_own_rate_the_kernel_does_not_tell_for_a_while_is_not_slow() -> None:
    for seed in range(20):
        assert watch(LinkWatcher(2), short_messages(range(200), seed=seed)) == []


def test_a_link_of_short_messages_that_becomes_slow_is_named() -> None:
    for seed in range(20):
        found = opened(watch(LinkWatcher(2), short_messages(range(60), seed=seed, slow_from=40)))
        assert [sorted(verdict.ranks) for verdict in found] == [[0, 1]]
        assert 40 <= found[0].since_step <= found[0].detected_step <= 46


def test_a_late_peer_is_not_a_slow_link() -> None:
    """The receiver shuts its window for nine tenths of the time: bytes that do cross, cross as fast as before."""
    watcher = LinkWatcher(2)
    rows = list(traffic([(0, 1), (1, 0)], range(30), healthy))
    wire = Wire(seconds=1.0, sent_bytes=5 * MB, wire_seconds=0.05, window_seconds=0.9, peer=1)
    rows += [{0: record(0, step, [wire]), 1: record(1, step)} for step in range(30, 60)]
    assert watch(watcher, rows) == []


@pytest.mark.parametrize("links", [[(0, 1), (1, 0)], RING4], ids=["two hosts", "a ring"])
@pytest.mark.parametrize("noise", [0.05, 0.15])
@pytest.mark.parametrize("seeds", [1, pytest.param(4, marks=pytest.mark.thorough)])
def test_healthy_links_are_not_accused(links: list[Link], noise: float, seeds: int) -> None:
    """2,000 periods each with log-normal rates, delayed acknowledgements and stray samples of the kernel."""
    for seed in range(seeds):
        assert watch(LinkWatcher(4), traffic(links, range(2_000), healthy, seed=seed, noise=noise)) == []


def test_links_with_little_to_carry_are_not_judged() -> None:
    steps = traffic(RING4, range(80), lambda link, step: (100 if step < 30 else 1) * MB, payload=100_000)
    assert watch(LinkWatcher(4), steps) == []


def test_a_slow_link_that_nobody_uses_any_more_is_over() -> None:
    watcher = LinkWatcher(4)
    steps = traffic(RING4, range(45), lambda link, step: (20 if link == (1, 2) and step >= 30 else 100) * MB)
    assert len(watch(watcher, steps)) == 1
    others = [link for link in RING4 if link != (1, 2)]
    assert watcher.suspects
    (ended,) = watch(watcher, traffic(others, range(45, 120), healthy))
    assert ended.ended
    assert not watcher.suspects


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="not Linux")
def test_a_kernel_that_counts_what_is_needed_is_told_from_one_that_does_not() -> None:
    with socket.socket() as sock:  # without a peer, which has counters of 0
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1024)
    assert has_tcp_info() == (read_counters(info) is not None)
    assert read_counters(info[:100]) is None


def test_memory_does_not_grow_with_steps() -> None:
    import pickle

    watcher = LinkWatcher(4)
    watch(watcher, traffic(RING4, range(300), healthy))
    before = len(pickle.dumps(watcher))
    watch(watcher, traffic(RING4, range(300, 900), healthy))
    assert len(pickle.dumps(watcher)) <= before * 1.05

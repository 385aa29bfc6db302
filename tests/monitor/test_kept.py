"""Whole results on input that is made from seeds and stands on thresholds, held against what was kept."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.support.kept import Kept
from tests.support.waiting import Clock

from ringside.monitor import RunInfo, StepRecord, Verdict, detect
from ringside.monitor.alerts.book import AlertBook
from ringside.monitor.alerts.counters import MetricCounters
from ringside.monitor.causes import explain_verdict
from ringside.monitor.collector import StepCollector
from ringside.monitor.hang.attribution import Failure, ProcessState, RankState, WaitingCall, find_cause
from ringside.monitor.hang.detector import HangDetector, verdict_of
from ringside.monitor.job.collectives import CollectiveMeter, CollectiveSpan, best_buckets, bucket_mb
from ringside.monitor.job.questions import answer_questions
from ringside.monitor.job.watcher import CommunicationBound, InputBound, JobWatcher, SmallCollectives
from ringside.monitor.links.sampler import LinkTotals
from ringside.monitor.links.watcher import LinkState, LinkWatcher, judge_link
from ringside.monitor.replicas import Check, ReplicaCheck
from ringside.monitor.run.directory import STEPS as STEPS_FILE
from ringside.monitor.run.directory import RunReader, RunWriter
from ringside.monitor.run.records import Row, Vitals, Wire
from ringside.monitor.run.table import VitalsGatherer, tabulate
from ringside.monitor.slow_rank.noise import learn
from ringside.monitor.slow_rank.pauses import PauseMeter, Pauses, judge_pauses, rejudge_pauses
from ringside.monitor.slow_rank.window_test import WindowTest
from ringside.monitor.stats import log_excess
from ringside.monitor.step_clock import SyncTimes
from ringside.monitor.summary import assess_run
from ringside.monitor.verdict import KINDS, headline
from ringside.monitor.vitals.process import Used, VitalSigns

from .jobs import event
from .machines import Machine
from .states import StepsSeen
from .turned_clock import World

pytestmark = pytest.mark.core

# ------------------------------------------------------------------------------------------------ who hangs


def pick(random: np.random.Generator, *values: Any) -> Any:
    return values[int(random.integers(len(values)))]


def standings(random: np.random.Generator) -> list[RankState]:
    """Ranks of which most wait in one collective, with ages on the judge's limits and beside them."""
    waited = pick(random, 3.9, 4.0, 4.1, 5.0, 11.0, 11.1, 30.0, 31.0, 120.0, 121.0)
    own = random.random() < 0.3
    return [_standing(random, rank, waited, own) for rank in range(int(random.integers(2, 6)))]


def _standing(random: np.random.Generator, rank: int, waited: float, own: bool) -> RankState:
    entered = pick(random, 40, 41, 41, 41, 41) if random.random() < 0.95 else pick(random, -1, 0, 1)
    size = pick(random, 4096, 4096, 4096, 4096, 4096, 4096, 8192)
    waits = random.random() < (0.9 if entered == 41 else 0.3)
    state = pick(random, "S", "S", "S", "R", "R", "D", "T", "t", "", "", "Z", "gone") if random.random() < 0.4 else "S"
    failed = random.random() < 0.03
    return RankState(
        rank=rank,
        step=pick(random, 6, 7),
        entered=entered,
        synced=pick(random, 1, 2, 3) if random.random() < 0.2 else 20,
        waiting_s=waited - 0.1 * (rank % 2) if waits else 0.0,
        still_s=pick(random, 3.0, 4.0, 4.1, 6.0) if random.random() < 0.1 else waited + 1.0,
        longest_s=pick(random, 1.4, 1.5, 4.0) if random.random() < 0.15 else 0.5,
        calls=[WaitingCall(number, "all_reduce", size) for number in range(entered - 2, entered + 1)],
        group_seq=pick(random, 5, 6, 6),
        call=pick(random, "barrier", "barrier", "barrier", "broadcast") if own and random.random() < 0.8 else "",
        call_bytes=pick(random, 0, 64),
        where=pick(random, "train.py:9 in f", ""),
        silent_s=pick(random, 2.0, 2.1, 4.0, 4.1, 11.1) if random.random() < 0.3 else 0.1,
        left=random.random() < 0.05,
        process=ProcessState(
            state=state,
            gone_s=pick(random, 0.3, 0.4, 0.5, 2.0) if state in ("Z", "gone") else 0.0,
            signal=pick(random, 0, 9, 11, int(signal.SIGTERM), 2, 1, 99) if state in ("Z", "gone") else 0,
            cpu_share=pick(random, math.nan, 0.0, 0.24, 0.25, 0.9),
            kernel_function=pick(random, "", "futex_wait_queue"),
        ),
        failure=Failure(pick(random, "mismatch", "late", "lost", "other"), [rank], "it called another")
        if failed
        else None,
    )  # fmt: skip


def test_who_keeps_jobs_from_going_on(kept: Kept) -> None:
    random, found = np.random.default_rng(0), []
    for number in range(500):
        ranks = standings(random)
        for at_end in (False, True):
            finding = find_cause(ranks, at_end=at_end)
            if finding is None:
                found.append([number, at_end])
                continue
            verdict = verdict_of(finding, ranks, [100, 101, 102])
            told = [verdict.cause, verdict.cost_rank_seconds, verdict.advice[:20], list(verdict.evidence.values())]
            found.append([number, at_end, *_row(finding), *(told if number % 8 == 0 else ())])
    kinds = Counter(f"{one[2]} {one[4]}" for one in found if len(one) > 2)
    kept("hangs", {"kinds": dict(sorted(kinds.items())), "found": found})


def _short(verdict: Verdict) -> list[Any]:
    """Return a verdict without its name of every field, and the first words of its advice."""
    return [verdict.kind, verdict.ranks, verdict.since_step, verdict.detected_step, verdict.excess_ratio, verdict.cause,
            list(verdict.evidence.values()), verdict.cost_rank_seconds, verdict.advice[-30:]]  # fmt: skip


def _row(finding: Any) -> list[Any]:
    return [getattr(finding, name) for name in finding.__dataclass_fields__]


def test_hangs_that_begin_and_end(kept: Kept) -> None:
    """Ranks that wait, go on, wait again and longer, die or come back, on a clock that now and then leaps."""
    told = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        watch, now, entered, since = HangDetector([7, 8, 9]), 100.0, 41, 0.0
        culprit, why = int(random.integers(3)), pick(random, "S", "S", "R", "D", "T", "")
        for _ in range(16):
            now += pick(random, 1.0, 1.0, 2.0, 2.0, 2.1) if random.random() < 0.95 else 9.0
            if random.random() < 0.2:
                entered, since = entered + 1, now
            dead = random.random() < 0.02
            ranks = [
                RankState(
                    rank=rank, step=entered, entered=entered - (rank == culprit), synced=20,
                    waiting_s=0.0 if rank == culprit else now - since, still_s=now - since, where="train.py:9",
                    silent_s=(now - since) * (why == ""),
                    process=ProcessState(state="Z" if dead else why if rank == culprit else "S", gone_s=9.0 * dead),
                )
                for rank in range(3)
            ]  # fmt: skip
            change = watch.check(ranks, now)
            if change is not None:
                told.append([seed, now, change.kind, change.verdict.cause, change.verdict.cost_rank_seconds,
                             change.verdict.evidence.get("resumed_after_seconds")])  # fmt: skip
    kept("hang_watch", told)


# ------------------------------------------------------------------------------------------------ links

MB = 1_000_000


def test_every_number_of_a_links_state(kept: Kept) -> None:
    """Periods at and beside each share of the usual rate that means something, of two kinds of rates."""
    found = []
    for seed in range(12):
        random = np.random.default_rng(seed)
        states = {link: LinkState() for link in [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2), (2, 0)]}
        for step in range(40):
            for link, state in states.items():
                share = 1.0 if step < 14 and link != (3, 0) else pick(random, *_SHARES)
                delivery = 100.0 * MB * (share if random.random() < 0.7 else pick(random, *_SHARES))
                sent = pick(random, 20 * MB, 20 * MB, 20 * MB, 1 << 18, (1 << 18) - 1, 2 * MB)
                wires = [Wire(seconds=1.0, sent_bytes=sent, wire_seconds=sent / (80.0 * MB * share), peer=link[1],
                              delivery_bytes_per_s=delivery, rtt_seconds=1e-3, retransmitted_bytes=step)]  # fmt: skip
                counts = state.add(step, wires, step * 1.0)
                slow = judge_link(link, states, wires, pick(random, math.inf, 100.0 * MB)) if counts else None
                if counts and slow is None and not state.is_doubtful:
                    state.learn()
                elif counts:
                    state.doubt()
                if slow is not None or step % 8 == 7:
                    told = slow and (slow.since_step, slow.against, slow.bytes_per_s, slow.extra_ratio)
                    found.append([seed, step, link, counts, state.recent.rate, state.usual, state.kept,
                                  state.is_doubtful, state.relief(state.usual), told])  # fmt: skip
    kept("link_states", found)


_SHARES = (1.0, 1.0, 0.39, 0.4, 0.41, 0.49, 0.5, 0.51, 0.6, 0.7, 0.75, 0.3)


@pytest.mark.parametrize("others", [0.55, 0.6, 0.7, 0.8, 1.0])
def test_a_link_has_become_slow_of_itself_if_it_kept_at_most_seven_tenths_of_what_the_others_did(others: float) -> None:
    """It keeps 0.42 of its usual rate; the others all keep the same share of theirs."""
    ring = [(0, 1), (1, 2), (2, 3), (3, 0)]
    states = {link: LinkState() for link in ring}
    told = []
    for step in range(30):
        for link, state in states.items():
            share = 1.0 if step < 20 else 0.42 if link == (0, 1) else others
            wire = Wire(seconds=1.0, sent_bytes=30 * MB, wire_seconds=0.3 / share, peer=link[1])
            if not state.add(step, [wire], float(step)):
                continue
            if link == (0, 1) and (slow := judge_link(link, states, [wire])) is not None:
                told.append(slow)
            if step < 20:
                state.learn()
    assert bool(told) is (0.7 * others >= 0.42)
    assert {slow.against for slow in told} <= {"its own past"}


def test_links_of_jobs(kept: Kept) -> None:
    """Links that become slow, alone, with another of their host or by half, and recover or fall silent."""
    found = []
    for seed in range(6):
        random = np.random.default_rng(seed)
        links = [(a, b) for a in range(4) for b in range(4) if a != b and (seed % 2 or abs(a - b) in (1, 3))]
        watcher = LinkWatcher(4, ["a", "a", "b", "c"] if seed % 3 else [])
        for step in range(110):
            carried = [link for link in links if seed != 4 or step < 60 or link != (1, 2)]
            rates = {link: 100.0 * MB * _share(seed, link, step) * np.exp(random.normal(0, 0.08)) for link in carried}
            row = _row_of_links(step, rates, float(random.normal(0.5, 0.01)))
            found += [[seed, step, one.ended, one.verdict] for one in watcher.update(step, row)]
            if step % 25 == 0:
                found.append([seed, step, watcher.suspects, [one.cost_rank_seconds for one in watcher.open]])
    kept("links", found)


def _share(seed: int, link: tuple[int, int], step: int) -> float:
    slow = link == (1, 2) or (seed in (2, 5) and 2 in link)
    return (0.3, 0.2, 0.15, 0.45, 0.2, 0.25)[seed] if slow and 35 <= step < 80 else 1.0


def _row_of_links(step: int, rates: dict[tuple[int, int], float], own: float) -> Row:
    exposed = 20 * MB / min(rates.values())
    records = {
        rank: StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=own + exposed, own_seconds=own,
                         exposed_seconds=exposed, payload_bytes=20 * MB, collectives=1)
        for rank in range(4)
    }  # fmt: skip
    for (src, dst), rate in rates.items():
        wire = Wire(seconds=1.0, sent_bytes=20 * MB, wire_seconds=20 * MB / rate, peer=dst, rtt_seconds=2e-4,
                    retransmitted_bytes=step % 3)  # fmt: skip
        records[src] = msgspec.structs.replace(records[src], wires=(*records[src].wires, wire))
    return records


# ------------------------------------------------------------------------------------------------ whole jobs


def job_rows(seed: int, steps: int) -> Iterator[Row]:
    """A job whose exposed share, input share and latency move around the bars, in stretches."""
    random = np.random.default_rng(seed)
    for step in range(steps):
        if step % 60 == 0:
            exposed, data = pick(random, 0.1, 0.39, 0.45, 0.5, 0.52, 0.7), pick(random, 0.0, 0.19, 0.25, 0.3, 0.35)
            many, latency = pick(random, 4, 10, 11, 40, 40), pick(random, 0.0, 0.002, 0.004)
        seconds = 0.3 * float(np.exp(random.normal(0, 0.03)))
        yield {
            rank: StepRecord(
                step=step, rank=rank, ended_unix=0.0, step_seconds=seconds, own_seconds=seconds * (1 - exposed),
                exposed_seconds=seconds * exposed * (1.0 + 0.1 * rank),
                data_seconds=seconds * data * (1.0 + 0.1 * rank),
                busy_seconds=(many * latency + 0.02) * (rank != 1), latency_seconds=latency * (rank != 2),
                payload_bytes=30 * MB, collectives=many,
            )
            for rank in range(3 if random.random() < 0.97 else 2)
        }  # fmt: skip


def test_what_holds_up_whole_jobs(kept: Kept) -> None:
    found = []
    for seed in range(10):
        small = SmallCollectives(2.0)
        bound = CommunicationBound(lambda small=small: small.episode.is_open or small.episode.is_high, 3.0)  # type: ignore[misc]
        watcher = JobWatcher(3, [small, bound, InputBound(5.0)])
        for row in job_rows(seed, 600):
            step = next(iter(row.values())).step
            found += [[seed, step, one.ended, *_short(one.verdict)] for one in watcher.update(step, row)]
    kept("jobs", found)


def test_what_a_collective_takes_whatever_its_size(kept: Kept) -> None:
    told = []
    for seed in range(8):
        random, meter, now = np.random.default_rng(seed), CollectiveMeter(), 0.0
        sizes = [[1 << 12] * 20, [1 << 14, 1 << 17, 1 << 20], [1 << 22] * 4, [64 << 10, (64 << 10) + 1]][seed % 4]
        for number in range(50):
            spans = []
            for size in sizes:
                took = 3e-4 + size / 2e8 + float(random.exponential(5e-5))
                spans.append(CollectiveSpan(now, now + took, size))
                now += took * pick(random, 1.0, 1.0, 0.5)
            busy = meter.add(reversed(spans) if number % 3 else spans)
            if number % 4 == 3:
                told.append([seed, number, busy, meter.latency_seconds])
    kept("latencies", told)


def test_best_buckets(kept: Kept) -> None:
    figures = [
        (count, payload, busy, latency)
        for count in (0, 1, 2, 10, 100)
        for payload in (0, 1 << 20, 5e8)
        for busy in (0.0, 0.01, 0.3)
        for latency in (0.0, 1e-4, 4e-3)
    ]
    kept("buckets", [[one, best_buckets(*one), bucket_mb(best_buckets(*one).bucket_bytes)] for one in figures])


# ------------------------------------------------------------------------------------------------ replicas


def test_replicas_that_drift_apart(kept: Kept) -> None:
    told = []
    for seed in range(16):
        random = np.random.default_rng(seed)
        ranks = pick(random, 2, 3, 4, 5)
        names = [f"p{n}" for n in range(pick(random, 1, 3))]
        replicas = ReplicaCheck(range(ranks), names, pick(random, "", "net"))
        lists: dict[int, dict[int, list[int]]] = {}
        checks: dict[int, list[Check]] = {rank: [] for rank in range(ranks)}
        odd: list[int] = []
        for number in range(1, 12):
            if random.random() < 0.4:
                odd = sorted({int(random.integers(ranks)) for _ in range(int(random.integers(0, 3)))})
            lists[number] = {
                rank: [100 + place + (rank in odd) * (place % 2 == number % 2) for place in range(len(names))]
                for rank in range(ranks)
                if random.random() < 0.97
            }
            for rank in range(ranks):
                if random.random() < 0.97:
                    checks[rank].append(Check(number, 100 * number, 5 + (rank in odd), 10.0 * number + rank))
            changes = replicas.judge(checks, lists.__getitem__)
            told += [[seed, number, replicas.judged, change.kind, *_short(change.verdict)] for change in changes]
        if seed % 5 == 0:
            replicas.without([0])
            told.append([seed, replicas.ranks])
    kept("replicas", told)


# ------------------------------------------------------------------------------------------------ the collector


def test_what_a_collector_makes_of_records_that_come_late_twice_or_never(kept: Kept) -> None:
    told: list[Any] = []
    for seed in range(8):
        random = np.random.default_rng(seed)
        info = RunInfo(schema=1, name="run", started_unix=0.0, world_size=3, engine="gloo")
        seen = StepsSeen()
        collector, tally = (
            StepCollector(3, clock=lambda: 5.0, watchers=[seen]),
            MetricCounters(info, wall=lambda: 1_000.0),
        )
        seconds = (0.004, 0.05, 0.3, 3.0)[seed % 4]
        records = [
            StepRecord(step=step, rank=rank, ended_unix=900.0 + step, step_seconds=seconds * 1.1, payload_bytes=8,
                       own_seconds=seconds * (1 + 0.1 * rank), exposed_seconds=0.1 * seconds * (3 - rank), samples=2,
                       wait_seconds=math.nan if step % 3 else 0.2 * seconds, overhead_seconds=1e-4)
            for step in range(160)
            for rank in range(3)
            if rank != 2 or not 40 <= step < 140
        ]  # fmt: skip
        lateness = 8.0 if seed < 4 else 40.0
        records.sort(key=lambda one: one.step + lateness * random.random() ** 4)
        for begin in range(0, len(records), 7):
            batch = records[begin : begin + 7] + records[max(begin - 3, 0) : begin : 5]
            collector.add(batch)
            tally.add(batch, collector)
            if begin % 77 == 0:
                told.append([seed, begin, collector.steps, collector.newest, collector.late, seen.states(3)])
                told.append(_figures(tally))
        told.append([collector.close(), collector.steps, collector.absurd, seen.states(3)])
        tally.add([], collector)
        told.append(_figures(tally))
    kept("collector", told)


def _figures(tally: MetricCounters) -> list[Any]:
    figures = tally.snapshot([], {}, {})
    return [figures.steps, figures.rank_totals, figures.rank_recent, figures.job_totals, figures.step_counts,
            figures.step_sum, figures.last_step_unix, figures.lag_seconds, figures.lag_steps, figures.records,
            figures.late, figures.invalid, figures.missing, figures.cost_rank_seconds]  # fmt: skip


def test_alerts_of_events_in_any_order(kept: Kept) -> None:
    told: list[Any] = []
    for seed in range(6):
        random, clock = np.random.default_rng(seed), Clock()
        book = AlertBook("run", "/runs/run", now=clock, wall=lambda clock=clock: 1.7e9 + clock())  # type: ignore[misc]
        for at in range(10, 90):
            clock.now += pick(random, 0.5, 1.0, 5.0)
            kind = pick(random, "verdict", "verdict", "repaired", "repaired", "note")
            about = pick(random, *KINDS, "slow_rank", "hang")
            heard = book.record(event(kind, about, int(random.integers(3)), at, cost_rank_seconds=1.5))
            heard += book.tick(pick(random, None, at - 1, at))
            told += [[seed, at, one.status, one.kind, one.ranks, one.started_unix, one.ended_unix, one.reason,
                      one.text, one.severity, one.fingerprint] for one in heard]  # fmt: skip
        told.append([seed, book.suppressed, dict(book.opened), [one.kind for one in book.active]])
        told += [[one.kind, one.reason, one.ended_unix] for one in book.close(pick(random, None, 7.0))]
    kept("alerts", told)


def test_headlines(kept: Kept) -> None:
    verdicts = [
        Verdict(kind=kind, ranks=ranks, since_step=1, detected_step=2, excess_ratio=ratio, evidence=evidence)
        for kind in KINDS
        for ranks, ratio in (([], 0.0994), ([3], 0.0996), ([1, 2], math.nan), ([0, 1, 5], 1.5))
        for evidence in ({}, {"pause_bar_seconds": 1.0, "resumed_after_seconds": 4.25, "decided": 0})
    ]
    kept("headlines", [headline(one) for one in verdicts])


# ------------------------------------------------------------------------------------------------ summaries

CULPRIT, ONSET, STEPS, RANKS = 2, 40, 90, 4
Share = Callable[[bool], dict[str, float]]
TROUBLES: dict[str, Share] = {
    "quota": lambda slow: {"throttled_seconds": 0.3 * slow, "quota_cpus": 1.5},
    "neighbour": lambda slow: {"waited_seconds": 0.32 * slow, "cpus": 4, "cpu_seconds": 1.0},
    "crowd": lambda slow: {"waited_seconds": 0.32 * slow, "cpus": 4, "cpu_seconds": 1.0 + 2.6 * slow},
    "steal": lambda slow: {"steal_ratio": 0.3 * slow},
    "memory": lambda slow: {"memory_stalled_seconds": 0.3 * slow},
    "faults": lambda slow: {"major_faults": 1000 * slow, "swapped_in_pages": 400 * slow},
    "clock": lambda slow: {"gpu_clock_mhz": 1980 - 600 * slow, "gpu_max_clock_mhz": 1980, "gpu_reasons": 0x20 * slow,
                           "gpu_celsius": 60 + 30 * slow, "gpu_watts": 400, "gpu_cap_watts": 700},
    "capped": lambda slow: {"gpu_clock_mhz": 1980 - 600 * slow, "gpu_reasons": 0x4 * slow},
    "idle": lambda slow: {"gpu_clock_mhz": 1980 - 600 * slow, "gpu_reasons": 1},
    "asleep": lambda slow: {"ran_seconds": 0.9 - 0.4 * slow},
    "nothing": lambda slow: {},
}  # fmt: skip


def slow_job(seed: int, phase: str, trouble: Share) -> list[StepRecord]:
    """A job one of whose ranks becomes slow in a phase, with what its machine shows of that."""
    random, made = np.random.default_rng(seed), []
    own = 0.1 * np.exp(random.normal(0, 0.01, (STEPS, RANKS)))
    extra = np.zeros((STEPS, RANKS))
    extra[ONSET:, CULPRIT] = 0.4 * own[ONSET:, CULPRIT]
    for step, rank in np.ndindex(STEPS, RANKS):
        whole = float((own + extra)[step].max()) + 0.01
        mine = float(own[step, rank] + extra[step, rank])
        phases = {name: share * float(own[step, rank]) for name, share in _PHASES.items()}
        for name in [phase] if phase else phases:
            phases[name] += float(extra[step, rank]) * (1.0 if phase else _PHASES[name])
        slow = rank == CULPRIT and step >= ONSET
        shares = {"ran_seconds": 0.95, "waited_seconds": 0.0, "throttled_seconds": 0.0, **trouble(slow)}
        shares["ran_seconds"] -= shares["waited_seconds"] + shares["throttled_seconds"]
        seconds = 3.0 * whole
        timed = {
            name: value * seconds * (mine / whole if name in _OF_OWN else 1.0) * float(np.exp(random.normal(0, 0.02)))
            for name, value in shares.items()
            if name.endswith("_seconds") or name in _COUNTED
        }
        known: dict[str, Any] = {**shares, **timed}
        known |= {name: round(known[name]) for name in (*_COUNTED, "cpus", "gpu_reasons") if name in known}
        made.append(
            StepRecord(
                step=step, rank=rank, ended_unix=float(step), step_seconds=whole, own_seconds=mine,
                exposed_seconds=whole - mine, wait_seconds=math.nan if step % 2 else whole - mine - 0.01,
                cpu_seconds=0.9 * mine, payload_bytes=4 * MB, collectives=2 + 20 * (seed % 2), samples=8,
                sync_seconds=0.02, overhead_seconds=1e-4, loss=3.0 - 0.01 * step if rank < 2 else None,
                busy_seconds=0.008, latency_seconds=0.0003,
                vitals=Vitals(seconds=seconds, **known) if step % 3 == 0 else None,
                **{f"{name}_seconds": value for name, value in phases.items()},
            )
        )  # fmt: skip
    return made


_PHASES = {"data": 0.05, "forward": 0.3, "backward": 0.55, "optimizer": 0.1}
_OF_OWN = ("ran_seconds", "waited_seconds", "throttled_seconds")
_COUNTED = ("major_faults", "swapped_in_pages")


def test_what_keeps_a_gpus_clock_down(kept: Kept) -> None:
    told = []
    for bits in (0, *(1 << bit for bit in range(9)), 0x24, 0x6):
        shares = {"gpu_max_clock_mhz": 1980.0, "gpu_celsius": 91.0}
        slower = {True: {**shares, "gpu_clock_mhz": 1380.0, "gpu_reasons": bits}}
        slower[False] = {**shares, "gpu_clock_mhz": 1980.0, "gpu_reasons": 0}
        table = tabulate(slow_job(0, "", slower.__getitem__), RANKS)
        verdict = explain_verdict(named(), table.between(ONSET), table.before(ONSET))
        told.append([bits, verdict.cause, verdict.advice])
    kept("clocks", told)


def named(rank: int = CULPRIT, kind: str = "slow_rank", since: int = ONSET, **evidence: float) -> Verdict:
    return Verdict(
        kind=kind, ranks=[rank], since_step=since, detected_step=since + 5, excess_ratio=0.4, evidence=evidence
    )


@pytest.mark.parametrize("trouble", TROUBLES)
def test_summaries_say_what_held_a_rank_up(kept: Kept, trouble: str, tmp_path: Path) -> None:
    found = {}
    for seed, phase in enumerate(("", "data", "backward")):
        info = RunInfo(schema=1, name="run", started_unix=0.0, world_size=RANKS, engine="gloo",
                       hosts=["a", "a", "b", "b"] if seed % 2 else ["a"] * RANKS)  # fmt: skip
        writer = RunWriter(tmp_path / phase, info)
        writer.append(slow_job(seed, phase, TROUBLES[trouble]))
        told = [named(usual_excess_ratio=0.02), *([named(1, "uneven_work", 10, until_step=30)] * (seed == 1))]
        for verdict in told:
            writer.event({"unix": 1.0, "kind": "verdict", "verdict": msgspec.to_builtins(verdict)})
        summary, _ = assess_run(RunReader(tmp_path / phase))
        verdicts = [{**one, "advice": one["advice"][:40]} for one in summary["verdicts"]]
        found[phase or "all"] = {**summary, "verdicts": verdicts} if trouble == "nothing" else verdicts
    kept(f"summary_{trouble}", found)


def test_the_four_questions_at_their_bars(kept: Kept) -> None:
    random, told = np.random.default_rng(2), []
    for number in range(120):
        info = RunInfo(schema=1, name="run", started_unix=0.0, world_size=3, engine="gloo",
                       hosts=pick(random, [], ["a", "a", "a"], ["a", "b", "a"], ["a", "", "b"]))  # fmt: skip
        step = pick(random, 0.1, 0.5)
        exposed = step * pick(random, 0.02, 0.09, 0.11, 0.19, 0.2, 0.21, 0.5)
        slower, count = pick(random, 1.0, 1.09, 1.1, 1.11, 1.5), pick(random, 0, 1, 10, 11, 30)
        latency, optimizer = pick(random, 0.0, 1e-4, 3e-3), exposed * pick(random, 0.5, 0.99, 1.01, 3.0)
        records = [
            StepRecord(
                step=at, rank=rank, ended_unix=0.0, step_seconds=step,
                own_seconds=(step - exposed) * (slower if rank == 1 else 1),
                exposed_seconds=exposed * (1 + 0.1 * rank), optimizer_seconds=optimizer, collectives=count,
                payload_bytes=pick(random, 0, 10**4, 10**8), busy_seconds=pick(random, 0.0, 0.01 + count * latency),
                latency_seconds=latency,
            )
            for at in range(pick(random, 2, 3, 8))
            for rank in range(3)
            if random.random() < 0.97
        ]  # fmt: skip
        links = [
            LinkTotals(src=a, dst=b, sent_bytes=9, wire_seconds=1.0, bytes_per_s=1e6 * (a + 2 * b),
                       retransmitted_bytes=0, wire_ratio=exposed / step * pick(random, 0.2, 0.49, 0.51))
            for a, b in ((0, 1), (1, 2))
        ] * pick(random, 0, 0, 1)  # fmt: skip
        slow = Verdict(kind="slow_link", ranks=[0, 1], since_step=2, detected_step=3, excess_ratio=1.0)
        verdicts = pick(random, [], [], [slow], [named(1, since=1)])
        found = answer_questions(info, tabulate(records, 3), verdicts, links)
        told.append([number, [[one.answer, list(one.numbers.values()), one.words] for one in found.values()]])
    kept("questions", told)


def test_what_a_machine_says_of_a_rank(kept: Kept, tmp_path: Path) -> None:
    """Files that appear, change, are damaged and vanish; a process that moves between cgroups with quotas above it."""
    random, machine, told = np.random.default_rng(4), Machine(tmp_path), []
    uses = [Used(0.0, 0, 0)]
    signs: VitalSigns | None = None
    ran, waited, stood, stolen = [0.0] * 4, [0.0] * 4, {"job": 0.0, "job/deep": 0.0}, 0
    for number in range(36):
        machine.time += pick(random, 0.5, 1.0, 2.0)
        machine.cost += pick(random, 0.0, 1e-5, 2e-3) if number > 28 else 0.0
        cpu_s, faults, preemptions = uses[-1]
        uses.append(Used(cpu_s + random.random(), faults + pick(random, 0, 0, 7), preemptions + 3))
        for thread in range(4):
            ran[thread] += float(random.random())
            waited[thread] += 0.3 * float(random.random()) * (thread % 2)
            machine.thread(7 + thread, ran[thread], waited[thread])
        stolen += pick(random, 0, 5)
        machine.cpu(100 * number, stolen, count=pick(random, 2, 3))
        machine.write("proc/vmstat", f"nr_free_pages 5\npswpin {3 * number}\n")
        if number % 8 == 3:
            machine.lives_in(pick(random, "/job", "/job/deep", "/elsewhere", "/job/../x"))
        for path in stood:
            stood[path] += pick(random, 0.0, 0.4)
            machine.quota_v2(path, pick(random, "150000 100000", "max 100000", "50000 100000"), stood[path])
        where = pick(random, "proc/pressure/memory", "sys/fs/cgroup/job/memory.pressure")
        machine.write(where, f"some avg10=0.00 avg60=0.00 total={1000 * number}\nfull avg10=0 total=9\n")
        if signs is None:
            machine.lives_in("/job")
            signs = VitalSigns(tmp_path, now=lambda: machine.time, cost=lambda: machine.cost, usage=lambda: uses[-1],
                               cpus=lambda: {0, 1})  # fmt: skip
        told.append(signs.since())
    assert signs is not None
    signs.close()
    kept("vitals", [one and [getattr(one, name) for name in one.__struct_fields__] for one in told])


def test_records_of_steps_of_every_shape(kept: Kept) -> None:
    """Accumulation, several syncs, time blocked inside of forward, losses told late, optimizers around everything."""
    told = []
    for seed in range(25):
        random = np.random.default_rng(seed)
        world = World(always_synced=seed % 5 == 4)
        for _ in range(8):
            world.passes(0.25)
            for _ in range(pick(random, 1, 1, 2, 3)):
                world.forward(pick(random, 1.0, 2.0), pick(random, 0, 8))
                if random.random() < 0.3:
                    world.clock.blocks()
                    world.passes(0.125)
                    world.clock.blocked(0.125)
                if random.random() < 0.3:
                    world.clock.instrumented(0.0625)
                if random.random() < 0.8:
                    times = SyncTimes(0.7, 0.2, pick(random, 0.4, math.nan), 1000, 2, 0.5, pick(random, 0.0, 0.01))
                    world.backward(times=times)
            if random.random() < 0.9:
                world.optimizer(pick(random, 0.5, 1.0))
            if random.random() < 0.5:
                world.clock.log(pick(random, None, 2.5), pick(random, None, 3))
            if random.random() < 0.1:
                world.clock.restart()
        world.clock.flush()
        told.append([[getattr(one, name) for name in one.__struct_fields__[:20]] for one in world.records])
    kept("steps", told)


def test_what_is_read_of_a_run_that_outgrew_its_file_and_was_damaged(kept: Kept, tmp_path: Path) -> None:
    writer = RunWriter(
        tmp_path, RunInfo(schema=1, name="run", started_unix=0.0, world_size=2, engine="gloo"), full_bytes=9_000
    )
    strides = []
    for step in range(400):
        writer.append(
            StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=1.0, own_seconds=0.5 + 0.1 * rank)
            for rank in (0, 1)
        )
        strides.append(writer.stride)
    path = tmp_path / STEPS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3:3] = [b"\n", b"{}\n", b'{"step":1,"rank":0,"ended_unix":0,"step_seconds":null,"own_seconds":1e300}\n']
    lines[5:5] = [b'{"step":9,"rank":1,"ended_unix":0,"step_seconds":null,"own_seconds":2}\n', lines[0][:-9]]
    path.write_bytes(b"".join(lines) + lines[1][:20])
    reader = RunReader(tmp_path)
    found = reader.poll()
    with path.open("ab") as file:
        file.write(lines[1][20:] + lines[2])
    more = reader.poll()
    told = [[[one.step, one.rank, one.step_seconds] for one in part] for part in (found[:12], found[-3:], more)]
    begun = [strides.index(one) for one in sorted(set(strides))]
    noted = [event.get("stride") for event in reader.poll_events()]
    kept("run", [begun, len(lines), told, noted, assess_run(RunReader(tmp_path))[0]["steps"]])


def test_of_many_records_and_vitals_every_second_is_left_out_again_and_again(kept: Kept) -> None:
    records = [
        StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=1.0, own_seconds=1.0,
                   vitals=Vitals(seconds=1.0, cpu_seconds=float(step)) if (step + rank) % 2 else None)
        for step in range(-2, 130)
        for rank in range(4)
    ]  # fmt: skip
    gatherer = VitalsGatherer(3, limit=20)
    for record in records:
        if record.rank < 3:
            gatherer.add(record)
    vitals, table = gatherer.table(), tabulate(records[::-1], 3, cells=60)
    parts = [table.between(20, 60).steps, table.before(40).steps, vitals.between(10, 50).steps]
    means = vitals.mean(vitals["cpu_seconds"])
    kept("thinned", [vitals.steps, vitals.owners, means, table.stride, table.steps, table.vitals.steps, parts])


# ------------------------------------------------------------------------------------------------ slow ranks


def troubled(jobs: int, steps: int, ranks: int, seed: int) -> np.ndarray:
    """Own times [steps, jobs, ranks] of jobs; in each one rank becomes slow, by little or by much, for a while.

    Their noise is small or great, independent or lasting, with or without late steps and gaps.
    """
    random = np.random.default_rng(seed)
    noise = random.normal(0, 1, (steps, jobs, ranks))
    lasting = np.arange(jobs) % 3 == 2
    for step in range(1, steps):
        noise[step, lasting] = 0.7 * noise[step - 1, lasting] + 0.7 * noise[step, lasting]
    own = 0.1 * np.exp(noise * np.linspace(0.005, 0.08, jobs)[None, :, None])
    for job in range(jobs):
        begin, lasts = int(random.integers(16, steps // 2)), int(random.integers(12, steps // 2))
        own[begin : begin + lasts, job, job % ranks] *= 1.0 + pick(random, 0.06, 0.1, 0.15, 0.3, 1.0)
        own[:, job, (job + 1) % ranks] *= 1.0 + pick(random, 0.0, 0.0, 0.02, 0.04)
        own[:, job][random.random((steps, ranks)) < pick(random, 0.0, 0.0, 0.02, 0.06)] *= 3.0
        own[:, job][random.random((steps, ranks)) < pick(random, 0.0, 0.01)] = np.nan
    return own


@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_when_episodes_of_many_jobs_begin_and_end(kept: Kept, ranks: int) -> None:
    jobs, steps = {2: 64, 4: 96, 32: 24}[ranks], 170
    own, told = troubled(jobs, steps, ranks, ranks), []
    for job in range(jobs):
        screen = WindowTest(1, ranks)
        for step in range(steps):
            opened, closed = screen.update(log_excess(own[step, job : job + 1]))
            told += [[step, "opened", job, rank, screen.onset[0, rank], screen.usual[0, rank]]
                     for rank in np.flatnonzero(opened[0]).tolist()]  # fmt: skip
            told += [[step, "closed", job, rank, screen.relief[0, rank]] for rank in np.flatnonzero(closed[0]).tolist()]
    learnt = learn(log_excess(own[3:80]), np.array([5, 12, 40]), 5.0)
    kept(f"episodes_{ranks}", [*told, [float(np.mean(part)) for part in learnt]])


def test_verdicts_on_jobs(kept: Kept) -> None:
    own = troubled(3, 140, 4, seed=99)
    samples = np.where(own[:, 0] > 0.11, 12.0, 10.0)
    kept("verdicts", [detect(own[:, job], samples if job == 0 else None) for job in range(3)])


def test_when_ranks_are_known_to_pause(kept: Kept) -> None:
    jobs, ranks, steps = 60, 4, 700
    random, told = np.random.default_rng(5), []
    own = 0.1 * np.exp(random.normal(0, 0.02, (steps, jobs, ranks)))
    for job in range(jobs):
        every, lasts = pick(random, 8, 10, 12, 16), int(random.integers(150, 600))
        factor = pick(random, 1.4, 1.5, 1.6, 2.0, 3.0, 6.0, 3.0)
        own[np.arange(30, 30 + lasts, every), job, job % ranks] *= factor
        own[random.random(steps) < pick(random, 0.0, 0.01), job, (job + 1) % ranks] *= factor
    pauses = [Pauses(ranks) for _ in range(jobs)]
    busy = np.zeros((jobs, ranks), dtype=bool)
    for step in range(steps):
        busy[0, 0] = 200 <= step < 300
        changes = [pauses[job].update(own[step, job], busy[job]) for job in range(jobs)]
        opened, closed = map(np.array, zip(*changes, strict=True))
        for job, rank in np.argwhere(opened).tolist():
            rhythm = pauses[job].rhythm[rank]
            verdict = judge_pauses(rank, rhythm, ranks, since_step=rhythm.first - 1, detected_step=step)
            meter = PauseMeter(verdict)
            meter.add(own[step : step + 40, job])
            again = rejudge_pauses(verdict, own[rhythm.first - 1 : step, job])
            told.append(
                [step, "opened", job, rank, rhythm, *_short(verdict)[4:-1], *_short(again)[4:-1], meter.rank_seconds]
            )
        told += [[step, "closed", job, rank, pauses[job].last[rank]] for job, rank in np.argwhere(closed).tolist()]
    kept("pauses", told)

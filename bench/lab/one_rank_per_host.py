"""The laws of all-reduces with one rank per host: the busiest link, two-tree, delay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from bench.common import Floor, report_progress
from bench.lab.expected import (
    SEGMENT_BYTES,
    Interval,
    busiest,
    chain,
    host_bytes,
    leaves,
    overlap,
    played_bytes,
    schedule_of,
)
from bench.lab.jobs import KB, MB, Case, Turn, Turns, take_turns
from bench.lab.report import Row, Section, size_words
from bench.lab.sections import RATE, SWITCHED

from ringside.lab import Lab, payload_bytes_per_second

LAW_SIZE, LAW_RANKS = 16 * MB, range(2, 9)
# Not more: eight hosts that send and receive at once keep two cores busy with TCP; at 250 Mbit/s even Gloo's ring took
# 1.4 times its law at n = 8.
LAW_RATE = "125mbit"
LAW_WAYS = (
    "parameter_server",
    "ring",
    "direct",
    "halving_doubling",
    "recursive_doubling",
    "tree",
    "two_tree*32",
    "chain*32",
    "native",
)


def laws(repeat: int) -> Section:
    """Compare the time of every algorithm with its busiest link's bytes by the rate: one rank per host."""
    full = payload_bytes_per_second(LAW_RATE)
    section = Section(
        "laws",
        f"One rank per host, {size_words(LAW_SIZE)}, star of {LAW_RATE} links: measured time by the busiest link's "
        "bytes / payload rate",
        [
            ("algorithm", "algorithm", "s"),
            ("n", "n", "d"),
            ("busiest link, MB", "link_bytes", ".1f"),
            ("fill, MB", "fill_bytes", ".2f"),
            ("law, ms", "law_ms", ".1f"),
            ("measured, ms", "ms", ".1f"),
            ("measured/law", "ratio", ".3f"),
            ("by its median", "by_median", ".3f"),
            ("played/law", "played", ".3f"),
            ("CPU, ms", "cpu_ms", ".0f"),
            ("CPU share", "cpu", ".2f"),
            ("idle", "idle", ".2f"),
        ],
    )
    with Lab(hosts=max(LAW_RANKS), rate=LAW_RATE) as lab:
        turns = {}
        for n in LAW_RANKS:  # each a job of its own: how connections share a link stays as it is for seconds
            report_progress(f"  laws: {n} hosts")
            turns[n] = take_turns(lab, [Case(n, LAW_SIZE, LAW_WAYS, 1, warm=True)], repeat, probes=True)
        report_progress("  laws: with a reducer at the switch")
        cases = [Case(n, LAW_SIZE, [SWITCHED], 1, warm=True) for n in LAW_RANKS]
        switched = take_turns(lab, cases, repeat, switch=True)
    for name in (*LAW_WAYS, SWITCHED):
        rows = [_law_row(switched if name == SWITCHED else turns[n], name, n, full) for n in LAW_RANKS]
        middle = median(row["ratio"] for row in rows)
        for row in rows:
            row["by_median"] = row["ratio"] / middle
        section.rows += rows
        section.floors += [
            Floor(f"laws, {name}: {word} of measured/law over n by its median", pick(r["by_median"] for r in rows), *at)
            for word, pick, at in (("least", min, (0.9, None)), ("most", max, (None, 1.1)))
        ]
    section.pivot = ("algorithm", "n", "words", "s")
    section.notes = [
        "in brackets, first: the simulated schedule by the same law (a segment in and one out at a time, each stored "
        "before it is forwarded). Then the processor time of all ranks, and what the kernel counts as idle, both in "
        "percent of the machine's cores in that time.",
        "busiest link: the busiest direction of a host's link, by the schedule.",
        "fill: segments that travel before the first one of the busiest link and after its last one, by the schedule's "
        f"chains of messages. A segment has {size_words(SEGMENT_BYTES)}, or an eighth of that if messages are small.",
        "native: Gloo's own all-reduce, compared with the ring's law. *32: pipelined in 32 segments.",
        "every timed call follows one of the same kind that does not count. In the first one every rank works out the "
        "order of messages, and idle connections begin slowly.",
    ]
    return section


def _law_row(turns: Turns, name: str, n: int, full: float) -> Row:
    link = busiest(schedule_of(name, n), LAW_SIZE, bytes_per_s=full)
    seconds, law_s = turns.seconds(n, LAW_SIZE, name), link.total_bytes / full
    schedule = schedule_of(name, n)
    played = None if schedule.switches else played_bytes(schedule, LAW_SIZE, full)
    by_play = None if played is None else played / link.total_bytes
    share, idle = _cpu_share(turns, n, name), turns.idle(n, LAW_SIZE, name)
    beside = "-" if by_play is None else format(by_play, ".2f")
    words = f"{seconds / law_s:.3f} ({beside}; {100 * share:.0f}, {100 * idle:.0f})"
    return {
        "algorithm": name,
        "n": n,
        "link_bytes": link.size_bytes / 1e6,
        "fill_bytes": link.fill_bytes / 1e6,
        "law_ms": law_s * 1e3,
        "ms": seconds * 1e3,
        "ratio": seconds / law_s,
        "played": by_play,
        "cpu_ms": 1e3 * turns.cpu_s(n, LAW_SIZE, name),
        "cpu": share,
        "idle": idle,
        "words": words,
    }


# ------------------------------------------------------------------------------------------------ two-tree

TREES = ("tree*32", "two_tree*32")


def two_tree(repeat: int) -> Section:
    """Compare the two-tree's gain over the single tree with what their busiest links say; look at its leaves."""
    full, ranks = payload_bytes_per_second(LAW_RATE), (4, 6, 8)
    section = Section(
        "two-tree",
        f"Two-tree against the single tree, both pipelined (*32), {size_words(LAW_SIZE)}, star of {LAW_RATE} links; "
        "and how much of a link's rate the single tree's leaves use, each way and both at once",
        [
            ("n", "n", "d"),
            ("by", "by", "s"),
            ("busiest link, MB", "link_bytes", ".1f"),
            ("ms", "ms", ".1f"),
            ("gain by the law", "law_gain", ".3f"),
            ("measured", "gain", ".3f"),
            ("measured/law", "ratio", ".3f"),
            ("leaves in", "counted_in", ".2f"),
            ("out", "counted_out", ".2f"),
            ("both, at least", "both", ".2f"),
            ("by the law", "law_both", ".2f"),
            ("as played", "played_both", ".2f"),
            ("by hops", "hops_both", ".2f"),
            ("CPU share", "cpu", ".2f"),
        ],
    )
    with Lab(hosts=max(ranks), rate=LAW_RATE) as lab:
        report_progress(f"  two-tree: {lab.hosts} hosts")
        cases = [Case(n, LAW_SIZE, TREES, 1, warm=True) for n in ranks]
        turns = take_turns(lab, cases, max(repeat, 3), hops=True, probes=True)
    for n in ranks:
        links = [busiest(schedule_of(name, n), LAW_SIZE, bytes_per_s=full) for name in TREES]
        law, gain = links[0].total_bytes / links[1].total_bytes, turns.ratio(n, LAW_SIZE, *TREES)
        for name, link in zip(TREES, links, strict=True):
            row = {"n": n, "by": name, "link_bytes": link.total_bytes / 1e6}
            row |= {
                "ms": turns.seconds(n, LAW_SIZE, name) * 1e3,
                "cpu": _cpu_share(turns, n, name),
                **_leaf_row(turns.of(n, LAW_SIZE, name), name, n, full),
            }
            if name == TREES[1]:
                row |= {"law_gain": law, "gain": gain, "ratio": gain / law}
            section.rows.append(row)
        last = section.rows[-1]
        section.floors.append(Floor(f"two-tree, n = {n}: gain by the law's", gain / law, 0.9, 1.1))
        what = f"two-tree, n = {n}: time in which those leaves use both directions, by the schedule's as played"
        section.floors.append(Floor(what, last["both"] / last["played_both"], 0.75))
    section.notes = [
        "leaves: of the single tree; for the two-tree those whose bytes fill both directions in the busiest link's "
        "time. One leaf is the other tree's root and has half of them.",
        "in, out: bytes on their links by the payload rate and the time, counted by the kernel; median.",
        "both, at least: where in + out > 1, both directions must have been busy at once for in + out - 1 of the time.",
        "by the law: the same of the schedule's bytes in the busiest link's time.",
        "as played: the same in the time of the simulated schedule, in which its pipeline fills and drains. A time "
        "longer by a tenth leaves 0.82 of 1.",
        "by hops: share of the time in which the per-hop timers saw messages on the wire to and from a leaf. A message "
        "of B bytes that arrived at t was on the wire from t - B / payload rate on, or longer: this is at least, too.",
        "every timed call follows one of the same kind that does not count, as for the laws.",
    ]
    return section


def _leaf_row(turns: Sequence[Turn], name: str, n: int, full: float) -> Row:
    schedule, law = schedule_of(name, n), host_bytes(name, LAW_SIZE, [1] * n)
    link = busiest(schedule, LAW_SIZE, bytes_per_s=full).total_bytes
    played = played_bytes(schedule, LAW_SIZE, full)
    # Leaves whose bytes fill both directions: one leaf of a two-tree is the other tree's root and has half of them.
    busy = [leaf for leaf in leaves(n) if sum(law[leaf]) > 1.5 * link] or leaves(n)
    shares = []
    for turn in turns:
        took = turn.span[1] - turn.span[0]
        for leaf in busy:
            hops, counted = turn.reports[leaf]["hops"], turn.reports[leaf]["counted"]
            others = [report["hops"] for rank, report in enumerate(turn.reports) if rank != leaf]
            receives = list(_on_the_wire(hops, full, None))
            sends = [interval for hops in others for interval in _on_the_wire(hops, full, leaf)]
            # What the kernel counted, in and out: beyond one, both directions were busy at once for that share.
            into, out = counted[0] / full / took, counted[2] / full / took
            both = max(into + out - 1, 0.0)
            busy_hops = overlap(receives, sends) / took
            shares.append({"counted_in": into, "counted_out": out, "both": both, "hops_both": busy_hops})
    row: Row = {key: median(share[key] for share in shares) for key in shares[0]}
    carried = median(sum(law[leaf]) for leaf in busy)
    row["law_both"] = max(carried / link - 1, 0.0)
    return row | {"played_both": None if played is None else max(carried / played - 1, 0.0)}


def _cpu_share(turns: Turns, n: int, name: str) -> float:
    """Return the processor time of all ranks by what the cores of the lab's machine have in that time."""
    return turns.cpu_s(n, LAW_SIZE, name) / turns.seconds(n, LAW_SIZE, name) / len(os.sched_getaffinity(0))


def _on_the_wire(hops: Sequence[Any], full: float, sender: int | None) -> Iterator[Interval]:
    """Yield when messages (of one sender) were on the wire, at least: each ends when it was there."""
    for src, size_bytes, _, _, last in hops:
        if sender is None or src == sender:
            yield last - size_bytes / full, last


# ------------------------------------------------------------------------------------------------ delay

# One way, from host to host; and a size whose bytes take no time beside it.
DELAY_S, DELAY_SIZE = 5e-3, 4 * KB
# Those that are held against rounds x delay; the others are shown.
DELAY_LAWS = ("ring", "recursive_doubling", "halving_doubling", "tree", "two_tree")
DELAY_WAYS = (*DELAY_LAWS, "direct", "parameter_server", "one_shot")


def delay(repeat: int) -> Section:
    """Compare the time of a small all-reduce with rounds x delay: one rank per host."""
    section = Section(
        "delay",
        f"One rank per host, {1e3 * DELAY_S:g} ms from host to host, {size_words(DELAY_SIZE)}: measured time by "
        "the longest chain of messages x delay",
        [
            ("algorithm", "algorithm", "s"),
            ("n", "n", "d"),
            ("rounds", "rounds", "d"),
            ("chain", "chain", "d"),
            ("law, ms", "law_ms", ".1f"),
            ("measured, ms", "ms", ".2f"),
            ("measured/law", "ratio", ".3f"),
        ],
    )
    if reason := Lab.unavailable(delay=True):
        section.notes = [f"not measured: {reason}"]
        return section
    cases = [Case(n, DELAY_SIZE, DELAY_WAYS, 6) for n in LAW_RANKS]
    with Lab(hosts=max(LAW_RANKS), rate=RATE, delay_s=DELAY_S) as lab:
        report_progress(f"  delay: {lab.hosts} hosts")
        turns = take_turns(lab, cases, repeat, apart=True)
    for name in DELAY_WAYS:
        for n in LAW_RANKS:
            rounds, hops = schedule_of(name, n).rounds, chain(schedule_of(name, n))
            seconds = turns.seconds(n, DELAY_SIZE, name)
            ratio = seconds / (hops * DELAY_S)
            row = {"algorithm": name, "n": n, "rounds": rounds, "chain": hops, "law_ms": hops * DELAY_S * 1e3}
            section.rows.append({**row, "ms": seconds * 1e3, "ratio": ratio})
            if name in DELAY_LAWS:
                section.floors.append(Floor(f"delay, {name}, n = {n}: by chain x delay", ratio, 0.85, 1.15))
    section.pivot = ("algorithm", "n", "ratio", ".3f")
    section.notes = [
        "measured: all ranks begin at an agreed time; from there to the last one's end; median of calls and turns.",
        "chain: messages that wait for each other, of which the law is made. It is the number of rounds, except off "
        "powers of two, where some rounds of the doublings overlap: there is no barrier between rounds.",
        "one_shot, direct and parameter_server are shown and not judged: they have more messages at once than rounds. "
        "The lab's delay is one process that forwards every frame, and takes longer for those than the law.",
    ]
    return section

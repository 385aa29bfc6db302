"""The laws of all-reduces by themselves: bytes on links, and the star of 4 hosts x 2 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from bench.common import Floor, report_progress
from bench.lab.expected import (
    FRAME_HEADER_BYTES,
    host_bytes,
)
from bench.lab.jobs import KB, MB, Case, Turn, Turns, take_turns
from bench.lab.open_mpi import all_reduce_seconds
from bench.lab.report import Row, Section, size_words

from ringside.lab import Lab, payload_bytes_per_second
from ringside.schedule import ALGORITHMS

RATE = "1gbit"
OURS = "default"
SWITCHED = "in_network"
# In 32 segments: by whole chunks a chain or tree leaves links idle.
PIPELINED = {"chain": "chain*32", "tree": "tree*32", "two_tree": "two_tree*32"}
# Algorithms that need no switch.
BETWEEN_HOSTS = [name for name in ALGORITHMS if name != SWITCHED]


# ------------------------------------------------------------------------------------------------ bytes

BYTES_SIZE, BYTES_CALLS = 4 * MB, 2


def bytes_on_links(repeat: int) -> Section:
    """Compare what the kernel counts on every host's link with what the schedule says."""
    section = Section(
        "bytes",
        f"Bytes on each host's link: the kernel's counters and the schedule ({size_words(BYTES_SIZE)}, all hosts, "
        "both directions; most and least of them)",
        [
            ("algorithm", "algorithm", "s"),
            ("ranks", "ranks", "s"),
            ("law, MB", "law_bytes", ".3f"),
            ("counted, MB", "counted_bytes", ".3f"),
            ("headers, %", "headers_percent", ".2f"),
            ("payload/law, least", "least", ".4f"),
            ("most", "most", ".4f"),
        ],
    )
    over_hosts = [f"hosts/{name}" for name in BETWEEN_HOSTS]
    jobs = (
        (8, 1, [*BETWEEN_HOSTS, *PIPELINED.values(), SWITCHED]),
        (4, 2, [*over_hosts, "leaders/ring", "ring", f"leaders/{SWITCHED}", "gloo"]),
    )
    for hosts, per_host, names in jobs:
        report_progress(f"  bytes: {hosts} hosts x {per_host}")
        with Lab(hosts=hosts, ranks_per_host=per_host, rate=RATE) as lab:
            section.rows += _byte_rows(lab, names, repeat)
    section.floors = [
        Floor(f"bytes, {row['algorithm']}, {row['ranks']}: payload by the law, {which} host", row[which], 0.97, 1.03)
        for row in section.rows
        for which in ("least", "most")
    ]
    section.notes = [
        "law and counted: of the busiest direction of a host's link, per all-reduce.",
        f"headers: {FRAME_HEADER_BYTES} B (Ethernet, IPv4, TCP with timestamps) for every frame that the kernel "
        "counted, acknowledgements among them. Frames are TCP's pieces of up to 16 KB, not of 1500 B: on a wire it "
        "would be 4.6% of the payload and half of that for acknowledgements.",
        "payload: counted less headers, less what an interval with the same barriers and no all-reduce counts.",
        "what is above 1: Gloo's header of each message, ours of each link and collective (64 B), repeated segments.",
    ]
    return section


def _byte_rows(lab: Lab, names: Sequence[str], repeat: int) -> Iterator[Row]:
    ranks = sum(lab.ranks_per_host)
    turns = take_turns(lab, [Case(ranks, BYTES_SIZE, ["idle", *names], BYTES_CALLS)], repeat, switch=True)
    idle = _payloads(turns.of(ranks, BYTES_SIZE, "idle"), lab.ranks_per_host)
    for name in names:
        own = turns.of(ranks, BYTES_SIZE, name)
        law = host_bytes(name, BYTES_SIZE, lab.ranks_per_host)
        payload = _payloads(own, lab.ranks_per_host)
        shares = [
            (payload[h][side] - idle[h][side]) / (law[h][side] * BYTES_CALLS)
            for h in range(lab.hosts)
            for side in (0, 1)
            if law[h][side] > 0
        ]
        # Of the direction of a host's link that counted most.
        reports = [report["counted"] for turn in own for report in turn.reports]
        counted, frames = max(pair for c in reports for pair in ((c[0], c[1]), (c[2], c[3])))
        yield {
            "algorithm": name,
            "ranks": f"{lab.hosts} x {lab.ranks_per_host[0]}",
            "law_bytes": max(max(pair) for pair in law) / 1e6,
            "counted_bytes": counted / BYTES_CALLS / 1e6,
            "headers_percent": 100 * frames * FRAME_HEADER_BYTES / counted,
            "least": min(shares),
            "most": max(shares),
        }


def _payloads(turns: Sequence[Turn], ranks_per_host: Sequence[int]) -> list[tuple[float, float]]:
    """Return what each host (received, sent) in a turn without headers, bytes: the median over rounds."""
    first = [sum(ranks_per_host[:h]) for h in range(len(ranks_per_host))]
    rows = [[turn.reports[rank]["counted"] for turn in turns] for rank in first]
    return [
        (
            median(c[0] - FRAME_HEADER_BYTES * c[1] for c in counts),
            median(c[2] - FRAME_HEADER_BYTES * c[3] for c in counts),
        )
        for counts in rows
    ]


# ------------------------------------------------------------------------------------------------ star

# From 16 MB on the bytes bound the time, so the share of the link is promised; below, the ratio to Gloo is.
LARGE = {16 * MB: ("hosts/ring", "hosts/halving_doubling", "hosts/direct"), 64 * MB: ("hosts/ring",)}
MIDDLE, SMALL = (8 * KB, 16 * KB, 32 * KB, 64 * KB), (4, 1 * KB)
SMALL_WAYS = (
    "hosts/recursive_doubling",
    "hosts/one_shot",
    "leaders/recursive_doubling",
    "leaders/one_shot",
    "leaders/direct",
    "one_shot",
)


def star(repeat: int) -> Section:
    """Compare ours with the link's rate and with Gloo: 4 hosts x 2 ranks."""
    hosts, per_host = 4, 2
    ranks, full = hosts * per_host, payload_bytes_per_second(RATE)
    section = Section(
        "star",
        f"Star, {hosts} hosts x {per_host} ranks, {RATE}: compared with stock Gloo and the link's payload rate "
        f"({full / 1e6:.1f} MB/s); busbw per host = 2(H-1)/H S/t",
        [
            ("size", "size", "s"),
            ("by", "by", "s"),
            ("ms", "ms", ".3f"),
            ("busbw/payload rate", "share", ".3f"),
            ("x Gloo", "x_gloo", ".2f"),
            ("rounds", "rounds", "s"),
            ("chosen", "chosen", "s"),
        ],
    )
    cases = [Case(ranks, size, ["gloo", OURS, *ways], 1) for size, ways in LARGE.items()]
    cases += [Case(ranks, size, ["gloo", OURS, *SMALL_WAYS]) for size in (*SMALL, *MIDDLE)]
    with Lab(hosts=hosts, ranks_per_host=per_host, rate=RATE) as lab:
        report_progress(f"  star: {hosts} hosts x {per_host}")
        turns = take_turns(lab, cases, repeat)
        report_progress("  star: Open MPI")
        beside, why = all_reduce_seconds(lab, [case.size_bytes for case in cases], repeat)
    for case in cases:
        section.rows += _star_rows(turns, case, hosts, full, beside.get(case.size_bytes))
    section.floors = list(_star_floors(section.rows))
    section.notes = [
        f"{OURS}: algorithm=None, after the first calls of a size, in which the promising choices take turns; the "
        "others: named. x Gloo: the median over rounds of the ratios of two neighbours; rounds: their interval.",
        why or "Open MPI: processes of its own in the same lab, right after; its ratio is one of medians.",
    ]
    return section


def _star_rows(turns: Turns, case: Case, hosts: int, full: float, open_mpi_s: float | None) -> Iterator[Row]:
    n, size = case.n, case.size_bytes
    gloo_s = turns.seconds(n, size, "gloo")
    measured = [(name, turns.seconds(n, size, name), turns.ratios(n, size, "gloo", name)) for name in case.contenders]
    if open_mpi_s is not None:
        measured.append(("open mpi", open_mpi_s, [gloo_s / open_mpi_s]))
    for name, seconds, ratios in measured:
        share = 2 * (hosts - 1) / hosts * size / seconds / full
        yield {
            "size": size_words(size),
            "size_bytes": size,
            "by": name,
            "ms": seconds * 1e3,
            "share": share if size >= MB else None,
            "x_gloo": median(ratios),
            "rounds": f"{min(ratios):.2f}-{max(ratios):.2f}" if len(ratios) > 1 and name != "gloo" else None,
            "chosen": turns.chosen(n, size) if name == OURS else None,
        }


def _star_floors(rows: Sequence[Row]) -> Iterator[Floor]:
    named = [row for row in rows if row["by"] not in ("gloo", "open mpi", OURS)]
    for size in (*LARGE, *MIDDLE, *SMALL):
        default = next(row for row in rows if row["by"] == OURS and row["size_bytes"] == size)
        best = max((row for row in named if row["size_bytes"] == size), key=lambda row: row["x_gloo"])
        least = 3.0 if size in MIDDLE else 1.0
        for by, row in ((OURS, default), (f"best named ({best['by']})", best)):
            name = f"star, {size_words(size)}, {by}"
            if size in LARGE:
                yield Floor(f"{name}: share of the payload rate", row["share"], 0.95)
            yield Floor(f"{name}: times Gloo's speed", row["x_gloo"], least)

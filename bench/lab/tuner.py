"""What the selection promises: it starts in under a second, and its choice is nowhere slower than `native`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import Floor, median_interval, process_group, report_progress
from bench.lab.jobs import KB, MB, Case, Turns, run_ranks, take_turns
from bench.lab.report import Row, Section, size_words
from bench.lab.sections import OURS, RATE

from ringside.lab import Lab

HOSTS, STARTS = 4, 5
# Those that are chosen for, and two at which one such class ends and the next begins.
SIZES = (4, KB, 4 * KB, 16 * KB, 32 * KB, 64 * KB, 256 * KB, MB, 2 * MB, 4 * MB, 16 * MB, 64 * MB)
ROUNDS = {4: 45, MB: 31, 2 * MB: 41, 16 * MB: 9, 64 * MB: 7}  # where a turn is a call or two, or an element
# Default's time by Gloo's, at most; seconds of start-up, at most.
MOST_SLOWER, MOST_START_S = 1.05, 1.0
STOCK = "gloo"
LARGE, RINGS = 16 * MB, {1: ("ring",), 2: ("hosts/ring", "leaders/ring")}  # from there on these are timed by name, too


def selection(repeat: int) -> Section:
    """Compare the default choice with stock Gloo at every size: 4 hosts x 2 ranks."""
    return _section("selection", 2, repeat)


def alone(repeat: int) -> Section:
    """The same with one rank per host."""
    return _section("selection-alone", 1, repeat)


def _section(name: str, per_host: int, repeat: int) -> Section:
    section = Section(name, "", _COLUMNS)
    cases = []
    for size in SIZES:
        contenders = [STOCK, OURS, *(RINGS[per_host] if size >= LARGE else ())]
        cases.append(Case(HOSTS * per_host, size, contenders, int(size > MB), ROUNDS.get(size, 0), size < LARGE))
    with Lab(hosts=HOSTS, ranks_per_host=per_host, rate=RATE) as lab:
        report_progress(f"  {name}: {HOSTS} hosts x {per_host}, start-up")
        starts = starts_of(run_ranks(lab, "bench.lab.tuner", {"starts": STARTS}, {"RINGSIDE_SELECTION": "fresh"}))
        report_progress(f"  {name}: beside stock Gloo")
        turns = take_turns(lab, cases, repeat)
    section.title = (
        f"The default choice compared with stock Gloo, {HOSTS} hosts x {per_host} ranks, {RATE}; start-up of the "
        f"selection, {len(starts)} times: {', '.join(f'{took:.2f}' for took, _ in starts)} s (with groups and "
        f"connections {', '.join(f'{whole:.2f}' for _, whole in starts)} s)"
    )
    section.rows = [row_of(turns, case) for case in cases]
    section.floors = list(floors_of(section, starts))
    section.notes = [
        "default: algorithm=None, after the first calls of a size, in which the promising choices take turns. Gloo: "
        "stock `torch.distributed.all_reduce`, which is what `native` calls.",
        "default/Gloo, default/named: medians over rounds of the ratios of two neighbours, and the 95% interval of "
        "that median (of order statistics).",
        "Start-up: of the slowest rank, each time a new communicator that reads no kept table.",
    ]
    return section


def starts_of(reports: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, float]]:
    """Return (selection, whole communicator) of each start, seconds, of the slowest rank."""
    return [(max(s for s, _ in start), max(w for _, w in start)) for start in zip(*reports, strict=True)]


def row_of(turns: Turns, case: Case) -> Row:
    """Return the table's line of one size."""
    n, size = case.n, case.size_bytes
    ratios = turns.ratios(n, size, OURS, STOCK)
    row: Row = {
        "size": size_words(size),
        "size_bytes": size,
        "gloo_ms": 1e3 * turns.seconds(n, size, STOCK),
        "ms": 1e3 * turns.seconds(n, size, OURS),
        "ratio": median(ratios),
        "interval": _interval_text(median_interval(ratios)),
        "chosen": turns.chosen(n, size),
    }
    beside = {name: turns.ratios(n, size, OURS, name) for name in case.contenders[2:]}
    said = [
        f"{name} {median(ratios):.3f} ({_interval_text(median_interval(ratios))})" for name, ratios in beside.items()
    ]
    return row | {"named": ", ".join(said) or None}


def floors_of(section: Section, starts: Sequence[tuple[float, float]]) -> Iterator[Floor]:
    """Return what is promised: start-up (the median), and every size."""
    yield Floor(f"{section.name}: start-up, median", median(took for took, _ in starts), most=MOST_START_S, unit="s")
    for row in section.rows:
        what = f"{section.name}, {row['size']} ({row['chosen']}): default's time by Gloo's"
        yield Floor(what, row["ratio"], most=MOST_SLOWER)


def _interval_text(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f}-{interval[1]:.3f}"


_COLUMNS = [
    ("size", "size", "s"),
    ("Gloo, ms", "gloo_ms", ".3f"),
    ("default, ms", "ms", ".3f"),
    ("default/Gloo", "ratio", ".3f"),
    ("interval", "interval", "s"),
    ("chosen", "chosen", "s"),
    ("default/named", "named", "s"),
]


@process_group()
def start_anew(plan: dict[str, Any]) -> None:
    """Make communicators on this rank, one after the other.

    Prints as JSON, for each, what the selection took and what all of it did (groups, connections, memory), seconds.
    """
    import torch.distributed as dist

    import ringside

    took: list[tuple[float, float]] = []
    for number in range(plan["starts"]):
        dist.barrier()
        began = time.perf_counter()
        with ringside.communicator() as comm:
            whole_s = time.perf_counter() - began
            took.append((comm.startup_s, whole_s))
            dist.barrier()
        if dist.get_rank() == 0:
            print(f"start {number + 1}: {took[-1][0]:.2f} s, all of it {whole_s:.2f} s", file=sys.stderr, flush=True)
    print(json.dumps(took), flush=True)


if __name__ == "__main__":  # on every rank of the lab, see `run_ranks`
    start_anew(json.loads(Path(sys.argv[1]).read_text()))

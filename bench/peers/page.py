"""docs/peers.md from the figures of `bench/peers/`: our time over the best peer's, cell by cell, and where we lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from bench.common import median_interval, page_table

from ringside.bench.plan import PEERS
from ringside.bench.result import name_of
from ringside.text import size

BEHIND, AHEAD, TINY_BEHIND, TINY_BYTES = 1.03, 0.95, 1.1, 64
LEAST_TURNS = 6  # all of so few are a 97% interval of their median, of five a 94% one
AHEAD_SHARE = 0.9
VERDICTS = ("ahead", "even", "behind", "undecided", "wrong")

HEAD = """# Beside the peers of today

Written by `python -m bench.peers --write`; do not edit. How it is measured, and how each peer is set up, is in
[Benchmarks](benchmarks.md#peers).

A cell is **our time ÷ the best peer's**: less than 1 is faster. It is the median of neighbouring turns in the same
processes; in brackets its 95% interval, by ranks of the sorted turns. Fewer than six turns give no such interval: in
brackets are the least and the most of them, and there is no verdict. The interval takes turns as independent; those of
one launch are not quite, so that it is rather too narrow. The best peer is the one by which we look worst.
"""

SHORT = """
> **A short run** of a few cells on a machine that was busy with other work (load {load:.0f} on {cores} cores): it shows
> that peers run and are checked. Its figures say nothing about speed.
"""


@dataclass(frozen=True)
class Cell:
    """Ours beside the best peer, in one case.

    Args:
        work: The collective or step.
        ranks: How many.
        case: Size in bytes, state of the cache, kind of memory and of array.
        peer: The best one.
        ratio: Our time over its.
        turns: Of how many turns it is the median.
        low: Lower end of the 95% interval of `ratio`.
        high: Upper end.
        times: Ours and the peer's: mean, median, 99th percentile, seconds.
        wrong: Wrong elements of ours.
    """

    work: str
    ranks: int
    case: tuple[int, str, str, str]
    peer: str
    ratio: float
    turns: int
    low: float
    high: float
    times: tuple[Sequence[float], Sequence[float]]
    wrong: int

    @property
    def verdict(self) -> str:
        """ahead, even, or behind: the interval lies wholly above what is tolerated; wrong results are none of these."""
        if self.wrong:
            return "wrong"
        if self.turns < LEAST_TURNS:
            return "undecided"
        tiny = self.case[0] < TINY_BYTES and self.work != "barrier"
        if self.low > (TINY_BEHIND if tiny else BEHIND):
            return "behind"
        return "ahead" if self.ratio <= AHEAD else "even"


def cells(launches: Mapping[str, Any]) -> list[Cell]:
    """Return a cell for every case, beside the peer by which we look worst; wrong peers are none."""
    by_case: dict[tuple[Any, ...], dict[str, list[Any]]] = {}
    for name, found in launches.items():
        work, ranks, peer, _ = name.split()
        for cell in found["cells"]:
            case = cell["size_bytes"], cell["cache"], cell["tensor"], cell["array"]
            if not cell["peer_wrong"]:
                by_case.setdefault((work, int(ranks), case), {}).setdefault(peer, []).append(cell)
    return [_best(key, peers) for key, peers in by_case.items()]


def _best(key: tuple[Any, ...], peers: Mapping[str, list[Any]]) -> Cell:
    def ratios(found: Sequence[Any]) -> list[float]:
        return [a / b for cell in found for a, b in zip(cell["ours_s"], cell["peer_s"], strict=True)]

    peer = max(peers, key=lambda name: median(ratios(peers[name])))
    found, turns = peers[peer], ratios(peers[peer])

    def times(who: str) -> Sequence[float]:
        mean = fmean(seconds for cell in found for seconds in cell[f"{who}_s"])
        return mean, *(median(cell[f"{who}_single_s"][i] for cell in found) for i in (0, 1))

    both = times("ours"), times("peer")
    work, ranks, case = key
    low, high = median_interval(turns)
    wrong = sum(cell["wrong"] for cells_of in peers.values() for cell in cells_of)
    return Cell(work, ranks, case, peer, median(turns), len(turns), low, high, both, wrong)


def page(results: Mapping[str, Any]) -> str:
    """Return the page of a file of results."""
    found, launches = cells(results["launches"]), results["launches"]
    dates = sorted({launch["date"] for launch in launches.values()})
    when = " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "never measured"
    parts = [HEAD, f"{results['cores']} cores, {when}.\n"]
    if results["short"]:
        load = max((launch["load"] for launch in launches.values()), default=0.0)
        parts.insert(1, SHORT.format(load=load, cores=results["cores"]))
    parts += ["## Result\n", _summary(found, results["cores"]), *_wrong(launches)]
    parts += ["## Where we lose\n", _table([cell for cell in found if cell.verdict == "behind"], lost=True)]
    parts += ["## Peers\n", _peers(results)]
    for work in dict.fromkeys(cell.work for cell in found):
        for ranks in dict.fromkeys(cell.ranks for cell in found if cell.work == work):
            chosen = [cell for cell in found if (cell.work, cell.ranks) == (work, ranks)]
            parts += [f"## {work}, {ranks} ranks\n", _table(chosen)]
    return "\n".join(parts)


def _summary(found: Sequence[Cell], cores: int) -> str:
    def row(what: str, chosen: Sequence[Cell]) -> list[str]:
        counts = [sum(cell.verdict == verdict for cell in chosen) for verdict in VERDICTS]
        return [what, str(len(chosen)), *map(str, counts)]

    rows = []
    for ranks in dict.fromkeys(cell.ranks for cell in found):
        chosen = [cell for cell in found if cell.ranks == ranks]
        more = " (more than cores)" if ranks > cores else ""
        rows.append(row(f"{ranks} ranks{more}, 64 B and more", [c for c in chosen if c.case[0] >= TINY_BYTES]))
        rows.append(row(f"{ranks} ranks{more}, less", [c for c in chosen if c.case[0] < TINY_BYTES]))
    goal = (
        f"\nThe goal, with no more ranks than cores: none *behind* (interval wholly above {BEHIND}; "
        f"below {TINY_BYTES} B above {TINY_BEHIND}), and {AHEAD_SHARE:.0%} *ahead* (at most {AHEAD}).\n"
    )
    return page_table(("", "cells", *VERDICTS), rows) + goal


def _wrong(launches: Mapping[str, Any]) -> Iterator[str]:
    total = 0
    for name, found in launches.items():
        for cell in found["cells"]:
            total += 1
            for who, count in (("ours", cell["wrong"]), (name.split()[2], cell["peer_wrong"])):
                if count:
                    yield f"- **Wrong**: {count} elements of {who} in {name}, {cell['size_bytes']} B"
    yield f"`#wrong` was checked in {total} cases of ours beside a peer.\n"


def _table(chosen: Sequence[Cell], *, lost: bool = False) -> str:
    if not chosen:
        return "Nowhere.\n" if lost else "Nothing was measured.\n"
    rows = []
    for cell in chosen:
        size_bytes, cache, tensor, array = cell.case
        ours, peer = (" / ".join(f"{seconds * 1e6:.3g}" for seconds in times) for times in cell.times)
        what = [f"{cell.work}, {cell.ranks}"] if lost else []
        told = f"{cell.ratio:.2f} ({cell.low:.2f} to {cell.high:.2f})"
        rows.append(
            [*what, size(size_bytes, binary=True), cache, f"{tensor} {array}", told, name_of(cell.peer), ours, peer]
        )
    head = ("size", "cache", "tensor", "ours ÷ best", "best", "ours: mean / median / p99 µs", "best: the same")
    return page_table((*(["collective, ranks"] if lost else []), *head), rows)


def _peers(results: Mapping[str, Any]) -> str:
    rows: dict[str, list[str]] = {peer: [f"absent: {reason}", ""] for peer, reason in results["absent"].items()}
    for name, found in results["launches"].items():
        work, _, peer, _ = name.split()
        row = rows.setdefault(peer, ["", ""])
        row[0] = row[0] or found["about"]
        if found["failed"] and f"{work}: " not in row[1]:
            row[1] += f"{work}: {found['failed']}<br>"
    for peer in PEERS:
        if peer != "mpi" and peer not in rows:
            rows[peer] = ["not asked in this run", ""]
    return page_table(("peer", "what it is", "could not"), [[name_of(peer), *row] for peer, row in rows.items()])

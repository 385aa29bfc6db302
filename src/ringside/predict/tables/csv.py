"""CSV of measurements: columns by any usual name, in any order and unit; several clusters in a file, several tables."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ringside.errors import UsageError
from ringside.predict.tables.table import ALL_REDUCE, Flag, Table, TableRow, collective_named, figure, wrong_sums
from ringside.text import parse_size

_SIZE = re.compile(r"^(size|bytes|nbytes|message_?size|size_bytes|sizeb|size_b)$")
_TIME = re.compile(
    r"^(?:median_|avg_|mean_)?(?:time|latency|duration|t)(?:_?avg)?_?(us|usec|ms|msec|s|sec|seconds|ns)?$"
)
_BAND = re.compile(r"^(alg|bus)_?(bw|bandwidth)_?(.*)$")
_P2P = re.compile(r"^(median_|avg_)?(bandwidth)_?(mb_?p?s|mbps|mb_s)$")
_WORDS = {"nodes": "hosts", "hosts": "hosts", "num_nodes": "hosts", "n_nodes": "hosts"}
_WORDS |= dict.fromkeys(("gpus", "ranks", "nranks", "world_size", "num_gpus", "np", "processes"), "ranks")
_WORDS |= dict.fromkeys(("cluster", "system", "machine", "hardware"), "cluster")
_WORDS |= dict.fromkeys(("algo", "algorithm"), "algorithm") | {"collective": "collective"}
_WORDS |= dict.fromkeys(("min_us", "min"), "low") | dict.fromkeys(("max_us", "max"), "high")
_SECONDS = dict.fromkeys(("", "us", "usec"), 1e-6) | dict.fromkeys(("ms", "msec"), 1e-3) | {"ns": 1e-9}
_SECONDS |= dict.fromkeys(("s", "sec", "seconds"), 1.0)

_KEY = ("cluster", "hosts", "ranks", "algorithm", "collective")
"""Columns whose content assigns a row to a table."""


@dataclass(frozen=True)
class _Columns:
    """What each column holds, and the unit of each."""

    place: Mapping[str, int]
    scale: Mapping[str, float]
    width: int
    collective: str = ALL_REDUCE
    wrong: Sequence[int] = ()  # nccl-tests' counts of wrong elements: out of place, in place


def read(text: str, stem: str) -> list[Table]:
    """Return the tables in a CSV's text; rows of one cluster, host count, rank count and algorithm are one table.

    Raises:
        UsageError: No line names a column of sizes and one of times.
    """
    columns: _Columns | None = None
    groups: dict[tuple[str, ...], tuple[list[TableRow], list[Flag]]] = {}
    collectives: dict[tuple[str, ...], str] = {}
    key: tuple[str, ...] = ("",) * len(_KEY)
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    mark = max(",;\t", key=first.count)
    for line, written in enumerate(io.StringIO(text), 1):
        if not written.strip() or written.lstrip().startswith("#"):
            continue
        # One line at a time: a quote that never closes must not swallow the rows that follow.
        try:
            cells = next(csv.reader([written.rstrip("\r\n")], delimiter=mark))
        except csv.Error:  # a carriage return within, or a cell longer than any: a row without content
            cells = [written]
        cells = [cell.strip() for cell in cells]
        named = _columns(cells)
        if named is not None:
            columns = named
            continue
        if columns is None:
            continue
        # A row of another width belongs, as an error, to the table of the row before it.
        if len(cells) == columns.width:
            key = tuple(cells[columns.place[name]] if name in columns.place else "" for name in _KEY)
        collectives.setdefault(key, columns.collective)
        rows, flags = groups.setdefault(key, ([], []))
        found = _row(columns, line, cells)
        if isinstance(found, TableRow):
            rows.append(found)
        else:
            flags.append(found)
    if columns is None:
        raise UsageError(
            f"{stem}: no columns of sizes and times; a CSV names them in its first line, such as size_bytes,time_us"
        )
    differ = [len({key[part] for key in groups}) > 1 for part in range(len(_KEY))]
    tables = []
    for key, (rows, flags) in groups.items():
        cluster, hosts, ranks, algorithm, collective = key
        # A table's name holds what distinguishes it from the others of the file.
        parts = [cluster, f"{hosts} hosts" if hosts else "", f"{ranks} ranks" if ranks else "", algorithm, collective]
        named_by = [part for part, differs in zip(parts, differ, strict=True) if part and differs]
        name = f"{stem}: {', '.join(named_by)}" if named_by else stem
        kind = collectives[key]
        if kind == ALL_REDUCE or ranks or algorithm:  # a latency among ranks is a collective's, not a pair's
            kind = collective_named(collective, algorithm) or ALL_REDUCE
        tables.append(Table(name, tuple(rows), tuple(flags), _int(ranks), _int(hosts), cluster, kind, algorithm))
    return tables


def _columns(cells: Sequence[str]) -> _Columns | None:
    """Return what the cells of a header name; None for a row that is no header."""
    place: dict[str, int] = {}
    scale: dict[str, float] = {}
    collective = ALL_REDUCE
    for index, cell in enumerate(cells):
        name, unit = _known(cell)
        if name and name not in place:
            place[name], scale[name] = index, unit
            if re.match(r"(median_|avg_)?latency", cell.strip().lower()):
                collective = "p2p_latency"
            elif name == "p2p":
                collective = "p2p_bandwidth"
    if "size" not in place or not ({"time", "p2p", "efficiency", "busbw", "algbw"} & set(place)):
        return None
    wrong = [index for index, cell in enumerate(cells) if cell.strip().lower() == "#wrong"]
    return _Columns(place, scale, len(cells), collective, wrong)


def _known(cell: str) -> tuple[str, float]:
    """Return what a header's cell names, empty: nothing that is read, and how much of a base unit its unit is."""
    plain = re.sub(r"[\s()/\[\]]+", "_", cell.strip()).strip("_")
    lower = plain.lower()
    if _SIZE.match(lower):
        return "size", 1.0
    if match := _BAND.match(lower):
        return f"{match[1]}bw", _bandwidth_unit(plain)
    if _P2P.match(lower):
        return "p2p", 1e6
    if match := _TIME.match(lower):
        return "time", _SECONDS[match[1] or ""]
    if lower.startswith("efficiency"):
        return "efficiency", 1.0
    return _WORDS.get(lower, ""), 1e-6


def _bandwidth_unit(name: str) -> float:
    """Return bytes per second of one unit in a column's name; GB/s where it names none. `b` is a bit, `B` a byte."""
    match = re.search(r"([KMGT])(i?)([bB])(?=p?s|_?s|_per|$)", name)
    if match is None:
        return 1e9
    base = 1024.0 if match[2] else 1000.0
    power = float(base ** ("KMGT".index(match[1]) + 1))
    return power / 8 if match[3] == "b" else power


def _row(columns: _Columns, line: int, cells: Sequence[str]) -> TableRow | Flag:
    """Return the row that a line of cells holds, or what is wrong with it."""
    if len(cells) != columns.width:
        reason = "columns of another table"
        if len(cells) < columns.width:
            reason = "cut by a line wrap, or columns are missing"
        return Flag(line, f"{len(cells)} fields where the header has {columns.width}: {reason}")
    place, scale = columns.place, columns.scale
    size = parse_size(cells[place["size"]], binary=True)
    if size is None:
        return Flag(line, f"{cells[place['size']]!r} is no size in bytes")
    if "p2p" in place:
        rate = figure(cells[place["p2p"]], scale["p2p"])
        usable = rate is not None and rate.value > 0
        return TableRow(line, size, size / rate.value, rate) if rate and usable else Flag(line, "no bandwidth", size)
    if "time" not in place:
        return Flag(line, "the table has no column of times", size)
    time = figure(cells[place["time"]], scale["time"])
    if time is None or not math.isfinite(time.value):
        return Flag(line, f"{cells[place['time']]!r} is no time", size)
    found = {}
    for name in ("algbw", "busbw", "low", "high"):
        text = cells[place[name]] if name in place else ""
        found[name] = figure(text, scale.get(name, 1.0))
        if text and found[name] is None:
            return Flag(line, f"{text!r} in column {name} is no number", size)
    low, high = (found[name].value if found[name] else None for name in ("low", "high"))  # type: ignore[union-attr]
    row = TableRow(line, size, time.value, found["algbw"], found["busbw"], low, high)
    return wrong_sums(line, [cells[index] for index in columns.wrong], size) or row


def _int(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 10 else 0

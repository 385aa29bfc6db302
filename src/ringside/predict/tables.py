"""Tables of measured collectives: one value for all the forms in which they are published.

`read_tables` recognises a file by its content: CSV (the columns of nccl-tests by any usual name, several clusters in
one file are several tables), a log of nccl-tests (`tables_nccl.py`), its JSON (`tables_json.py`) and the output of
the OSU micro-benchmarks (`tables_osu.py`). Nothing is judged here but what cannot be read at all; `checks.py` does.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringside.errors import UsageError

ALL_REDUCE = "all_reduce"
# Bus bandwidth over algorithm bandwidth for n ranks, as nccl-tests' PERFORMANCE.md defines it.
BUS_FACTORS: Mapping[str, tuple[float, float]] = {  # a + b/n
    ALL_REDUCE: (2.0, -2.0),
    "all_gather": (1.0, -1.0),
    "reduce_scatter": (1.0, -1.0),
    "alltoall": (1.0, -1.0),
    "sendrecv": (1.0, 0.0),
    "broadcast": (1.0, 0.0),
    "reduce": (1.0, 0.0),
}
MOST_BYTES = 256 << 20  # of one file; a table of 10,000 rows has 2 MB


@dataclass(frozen=True)
class Figure:
    """A number as somebody printed it.

    Args:
        value: In SI units (bytes, seconds, bytes per second).
        half_digit: Half of the last printed digit, same unit: the number may stand for anything this near.
    """

    value: float
    half_digit: float = 0.0


@dataclass(frozen=True)
class Row:
    """One measurement.

    Args:
        line: Line of the file (JSON: number of the result), from 1.
        size_bytes: Size of the tensor.
        time_s: Seconds per call.
        algbw: Bytes per second as stated; None where the table does not say.
        busbw: Bus bandwidth as stated, likewise.
        low_s: Shortest of several runs, seconds; None where only one figure is given.
        high_s: Longest of several runs, likewise.
    """

    line: int
    size_bytes: float
    time_s: float
    algbw: Figure | None = None
    busbw: Figure | None = None
    low_s: float | None = None
    high_s: float | None = None


@dataclass(frozen=True)
class Flag:
    """A row that is not used, and why.

    Args:
        line: Line of the file, from 1.
        reason: What is wrong with it, in plain words.
        size_bytes: Its size, where it could be read.
    """

    line: int
    reason: str
    size_bytes: float | None = None


@dataclass(frozen=True)
class Table:
    """The measurements of one collective on one set of ranks.

    Args:
        name: The file's name without its suffix; with what tells it apart where a file holds several tables.
        rows: In the file's order.
        flags: Rows that could not be read or were found wrong.
        ranks: Number of ranks; 0 where the table does not say (`checks.py` infers it).
        hosts: Number of hosts; 0 where it does not say.
        cluster: The hardware in words (device names in a log).
        collective: `all_reduce`, or another key of `BUS_FACTORS`; `p2p_latency` and `p2p_bandwidth` for OSU's.
        algorithm: As the table says (`auto`, `Ring`, ...).
        path: Where it came from.
    """

    name: str
    rows: tuple[Row, ...]
    flags: tuple[Flag, ...] = ()
    ranks: int = 0
    hosts: int = 0
    cluster: str = ""
    collective: str = ALL_REDUCE
    algorithm: str = ""
    path: str = ""

    @property
    def count(self) -> int:
        """All rows of the table, used or not."""
        return len(self.rows) + len(self.flags)

    def with_flags(self, rows: Iterable[Row], flags: Iterable[Flag]) -> Table:
        """Return the table with `rows` left in use and `flags` added, by line."""
        merged = sorted((*self.flags, *flags), key=lambda flag: flag.line)
        return replace(self, rows=tuple(rows), flags=tuple(merged))


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw/algbw of a collective among `ranks`; 1 where the collective is not known."""
    a, b = BUS_FACTORS.get(collective, (1.0, 0.0))
    return a + b / max(ranks, 1)


def read_tables(path: Path | str) -> list[Table]:
    """Return the tables of a file.

    Raises:
        UsageError: It cannot be opened, is no table of a known form, or is too large.
    """
    from ringside.predict import tables_json, tables_nccl, tables_osu

    path = Path(path)
    text = _text(path)
    for reader in (tables_json, tables_nccl, tables_osu):
        if reader.recognises(text):
            return [replace(table, path=str(path)) for table in reader.read(text, path.stem)]
    return [replace(table, path=str(path)) for table in read_csv(text, path.stem)]


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise UsageError(f"{path}: larger than {MOST_BYTES >> 20} MiB; a table of measurements is smaller")
        text = path.read_bytes().decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if "\0" in text:
        raise UsageError(f"{path} is not a text file; give a CSV, a log of nccl-tests, its JSON or OSU's output")
    return text


# ------------------------------------------------------------------------------------------------ CSV

_SIZE = re.compile(r"^(size|bytes|nbytes|message_?size|size_bytes|sizeb|size_b)$")
_TIME = re.compile(r"^(?:median_|avg_|mean_)?(?:time|latency|duration|t)(?:_?avg)?_?(us|usec|ms|msec|s|sec|seconds|ns)?$")
_BAND = re.compile(r"^(alg|bus)_?(bw|bandwidth)_?(.*)$")
_P2P = re.compile(r"^(median_|avg_)?(bandwidth)_?(mb_?p?s|mbps|mb_s)$")
_WORDS = {"nodes": "hosts", "hosts": "hosts", "num_nodes": "hosts", "n_nodes": "hosts"}
_WORDS |= dict.fromkeys(("gpus", "ranks", "nranks", "world_size", "num_gpus", "np", "processes"), "ranks")
_WORDS |= dict.fromkeys(("cluster", "system", "machine", "hardware"), "cluster")
_WORDS |= dict.fromkeys(("algo", "algorithm"), "algorithm") | {"collective": "collective"}
_WORDS |= dict.fromkeys(("min_us", "min"), "low") | dict.fromkeys(("max_us", "max"), "high")
_SECONDS = {"": 1e-6, "us": 1e-6, "usec": 1e-6, "ms": 1e-3, "msec": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0, "ns": 1e-9}


@dataclass(frozen=True)
class _Columns:
    """Which column says what, and the unit of each."""

    place: Mapping[str, int]
    scale: Mapping[str, float]
    width: int
    collective: str = ALL_REDUCE


def read_csv(text: str, stem: str) -> list[Table]:
    """Return the tables in a CSV's text; rows of one cluster, host count, rank count and algorithm are one table.

    Raises:
        UsageError: No line names a column of sizes and one of times.
    """
    columns: _Columns | None = None
    groups: dict[tuple[str, ...], tuple[list[Row], list[Flag]]] = {}
    collectives: dict[tuple[str, ...], str] = {}
    last: tuple[str, ...] | None = None
    for line, cells in _records(text):
        named = _columns(cells)
        if named is not None:
            columns = named
            continue
        if columns is None:
            continue
        key = _key(columns, cells) if len(cells) == columns.width else last
        key = key if key is not None else ("", "", "", "", "")
        last = key
        collectives.setdefault(key, columns.collective)
        rows, flags = groups.setdefault(key, ([], []))
        found = _row(columns, line, cells)
        if isinstance(found, Row):
            rows.append(found)
        else:
            flags.append(found)
    if columns is None:
        raise UsageError(
            f"{stem}: no columns of sizes and times; a CSV names them in its first line, such as size_bytes,time_us"
        )
    return [_table(stem, key, groups[key], collectives[key], len(groups) > 1) for key in groups]


def _records(text: str) -> Iterable[tuple[int, list[str]]]:
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    mark = max(",;\t", key=first.count)
    for line, written in enumerate(io.StringIO(text), 1):
        if written.strip() and not written.lstrip().startswith("#"):
            # One line at a time: a quote that never closes must not swallow the rows that follow.
            yield line, [cell.strip() for cell in next(csv.reader([written.rstrip("\r\n")], delimiter=mark))]


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
    return _Columns(place, scale, len(cells), collective)


def _known(cell: str) -> tuple[str, float]:
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


def _key(columns: _Columns, cells: Sequence[str]) -> tuple[str, ...]:
    names = ("cluster", "hosts", "ranks", "algorithm", "collective")
    return tuple(cells[columns.place[name]] if name in columns.place else "" for name in names)


def _row(columns: _Columns, line: int, cells: Sequence[str]) -> Row | Flag:
    if len(cells) != columns.width:
        what = "cut by a line wrap, or columns are missing" if len(cells) < columns.width else "columns of another table"
        return Flag(line, f"{len(cells)} fields where the header has {columns.width}: {what}")
    place, scale = columns.place, columns.scale
    size = parse_size(cells[place["size"]])
    if size is None:
        return Flag(line, f"{cells[place['size']]!r} is no size in bytes")
    if "p2p" in place:
        rate = figure(cells[place["p2p"]], scale["p2p"])
        usable = rate is not None and rate.value > 0
        return Row(line, size, size / rate.value, rate) if rate and usable else Flag(line, "no bandwidth", size)
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
    return Row(line, size, time.value, found["algbw"], found["busbw"], low, high)


def figure(text: str, scale: float = 1.0) -> Figure | None:
    """Return the number that `text` spells, in units of `scale`; None where it spells none."""
    text = text.strip()
    try:
        value = float(text)
    except ValueError:
        return None
    mantissa, _, power = text.lower().partition("e")
    digits = len(mantissa.partition(".")[2]) - (int(power) if power else 0)
    return Figure(value * scale, 0.5 * 10.0**-digits * scale)


_SIZE_TEXT = re.compile(r"^([0-9]*\.?[0-9]+(?:e\+?[0-9]+)?)\s*([kmgt]?)(i?)b?$", re.IGNORECASE)


def parse_size(text: str) -> float | None:
    """Return the bytes that `1048576`, `16M` or `2 GiB` stand for (K, M, G are powers of 1024, as in nccl-tests)."""
    match = _SIZE_TEXT.match(text.strip())
    if match is None:
        return None
    return float(match[1]) * 1024.0 ** " kmgt".index(match[2].lower() or " ")


_COLLECTIVES = {"allreduce": ALL_REDUCE, "allgather": "all_gather", "reducescatter": "reduce_scatter"}
_COLLECTIVES |= {"alltoall": "alltoall", "sendrecv": "sendrecv", "broadcast": "broadcast", "reduce": "reduce"}


def collective_named(*words: str) -> str | None:
    """Return the collective that one of `words` names exactly, in any spelling (`AllGather`, `all_gather_perf`)."""
    for word in words:
        plain = re.sub(r"[^a-z]", "", word.lower().removesuffix("_perf"))
        if plain in _COLLECTIVES:
            return _COLLECTIVES[plain]
    return None


def _table(stem: str, key: tuple[str, ...], found: tuple[list[Row], list[Flag]], kind: str, several: bool) -> Table:
    cluster, hosts, ranks, algorithm, collective = key
    name = stem
    if several:
        told = [cluster, f"{hosts} hosts" if hosts else "", f"{ranks} ranks" if ranks else "", algorithm]
        name = f"{stem}: {', '.join(word for word in told if word)}"
    if kind == ALL_REDUCE or ranks or algorithm:  # a latency among ranks is a collective's, not a pair's
        kind = collective_named(collective, algorithm) or ALL_REDUCE
    return Table(name, tuple(found[0]), tuple(found[1]), _int(ranks), _int(hosts), cluster, kind, algorithm)


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0

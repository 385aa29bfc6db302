"""A table of measured collectives: one value for all the forms in which they are published."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

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
class TableRow:
    """One measurement.

    Args:
        line: Line of the file (JSON: number of the result), from 1.
        size_bytes: Size of the tensor.
        time_s: Seconds per call.
        algbw: Bytes per second as stated; None where the table has none.
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
        wrong_sums: Whether the collective returned wrong sums there.
    """

    line: int
    reason: str
    size_bytes: float | None = None
    wrong_sums: bool = False


@dataclass(frozen=True)
class Table:
    """The measurements of one collective on one set of ranks.

    Args:
        name: The file's name without its suffix; with what distinguishes it where a file holds several tables.
        rows: In the file's order.
        flags: Rows that could not be read or were found wrong.
        ranks: Number of ranks; 0 where the table has none (`checks.py` infers it).
        hosts: Number of hosts; 0 where the table has none.
        cluster: The hardware in words (device names in a log).
        collective: `all_reduce`, or another key of `BUS_FACTORS`; `p2p_latency` and `p2p_bandwidth` for OSU's.
        algorithm: As the table names it (`auto`, `Ring`, ...).
        path: Where it came from.
        library: Which version measured it (`NCCL 2.29.2`); empty where the table does not say.
        dtype: Of its elements, as the table names it (`half`); empty likewise.
    """

    name: str
    rows: tuple[TableRow, ...]
    flags: tuple[Flag, ...] = ()
    ranks: int = 0
    hosts: int = 0
    cluster: str = ""
    collective: str = ALL_REDUCE
    algorithm: str = ""
    path: str = ""
    library: str = ""
    dtype: str = ""

    @property
    def count(self) -> int:
        """All rows of the table, used or not."""
        return len(self.rows) + len(self.flags)

    @property
    def wrong_sums(self) -> int:
        """Rows whose collective returned wrong sums."""
        return sum(flag.wrong_sums for flag in self.flags)

    def with_flags(self, rows: Iterable[TableRow], flags: Iterable[Flag]) -> Table:
        """Return the table with `rows` left in use and `flags` added, by line."""
        merged = sorted((*self.flags, *flags), key=lambda flag: flag.line)
        return replace(self, rows=tuple(rows), flags=tuple(merged))


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw/algbw of a collective among `ranks`; 1 where the collective is not known."""
    a, b = BUS_FACTORS.get(collective, (1.0, 0.0))
    return a + b / max(ranks, 1)


# ------------------------------------------------------------------------------------------------ words and figures


def figure(text: str, scale: float = 1.0) -> Figure | None:
    """Return the number that `text` spells, in units of `scale`; None where it spells none."""
    text = text.strip()
    try:
        value = float(text)
    except ValueError:
        return None
    mantissa, _, power = text.lower().partition("e")
    if not math.isfinite(value):  # nor does its last digit stand for anything
        return Figure(value)
    digits = len(mantissa.partition(".")[2]) - (int(power) if power else 0)
    return Figure(value * scale, 0.5 * 10.0**-digits * scale)


def wrong_sums(line: int, counts: Sequence[str], size_bytes: float) -> Flag | None:
    """Return the flag of a row of which nccl-tests counted wrong elements (`#wrong`), out of place or in place."""
    wrong = [max(count.value, 0.0) if (count := figure(text)) else 0.0 for text in counts]
    if not any(wrong):
        return None
    places = [f"{many:g} {place}" for many, place in zip(wrong, ("out of place", "in place"), strict=False) if many]
    return Flag(line, f"wrong sums: {' and '.join(places)}", size_bytes, wrong_sums=True)


_COLLECTIVES = {"allreduce": ALL_REDUCE, "allgather": "all_gather", "reducescatter": "reduce_scatter"}
_COLLECTIVES |= {"alltoall": "alltoall", "sendrecv": "sendrecv", "broadcast": "broadcast", "reduce": "reduce"}


def collective_named(*words: str) -> str | None:
    """Return the collective that one of `words` names exactly, in any spelling (`AllGather`, `all_gather_perf`)."""
    for word in words:
        plain = re.sub(r"[^a-z]", "", word.lower().removesuffix("_perf"))
        if plain in _COLLECTIVES:
            return _COLLECTIVES[plain]
    return None

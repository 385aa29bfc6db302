"""Numbers in words, as short as they may be: durations, sizes, ratios, ranks, counts."""

from __future__ import annotations

import difflib
import itertools
import math
import re
import time
from collections.abc import Iterable, Sequence
from itertools import groupby

from ringside.errors import UsageError

UNKNOWN = "–"
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_BINARY_BYTES = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_SECONDS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_RANK_TIMES = ((86_400.0, "rank-days"), (3_600.0, "rank-hours"))


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that reads best: `12.3 ms`, `1.20 s`, `3.50 h`; a dash where they are not known."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    for scale, unit in _SECONDS:
        if abs(seconds) >= scale:
            return f"{digits(seconds / scale)} {unit}"
    return f"{digits(seconds / 1e-9)} ns"


def rank_time(rank_seconds: float) -> str:
    """Return rank-seconds in the unit that reads best: `41.0 rank-seconds`, `10.2 rank-days`."""
    for scale, unit in _RANK_TIMES:
        if rank_seconds >= scale:
            return f"{digits(rank_seconds / scale)} {unit}"
    return f"{digits(rank_seconds)} rank-seconds"


def size(count: float | None, *, binary: bool = False) -> str:
    """Return bytes in the unit that reads best: `3.46 MB`, or `64 MB` where they are exactly so many; a dash: unknown.

    A kB, MB or GB has 10^3, 10^6 or 10^9 bytes wherever a size is printed; powers of two are called KiB, MiB and GiB.

    Args:
        count: Bytes.
        binary: In powers of two: `64 KiB`, `25 MiB`. For limits and benchmarked sizes, which are chosen so.
    """
    if count is None or not math.isfinite(count):
        return UNKNOWN
    for scale, unit in _BINARY_BYTES if binary else _BYTES:
        if count >= scale:
            value = count / scale
            return f"{value:.0f} {unit}" if value.is_integer() else f"{digits(value)} {unit}"
    return "0 B"


def rate(bytes_per_s: float | None) -> str:
    """Return bytes per second: `119 MB/s`; a dash where they are not known."""
    return UNKNOWN if bytes_per_s is None or not math.isfinite(bytes_per_s) else f"{size(bytes_per_s)}/s"


def giga(value: float) -> str:
    """Return bytes per second as a number of GB/s, the unit of nccl-tests' bandwidths, for where it stands beside."""
    return digits(value / 1e9)


def ratio(value: float | None) -> str:
    """Return a ratio as a factor: `1.42 ×`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f} ×"


def percent(value: float | None, decimals: int | None = None) -> str:
    """Return a ratio as a percentage: `12%`, `3.4%`; a dash where it is not known.

    Args:
        value: The ratio: 0.12 is 12%.
        decimals: How many; None: as many as mean something.
    """
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if decimals is None:
        decimals = 1 if abs(value) < 0.0995 else 0
    return f"{100 * value:.{decimals}f}%".replace("-", "−")


def signed_percent(value: float | None) -> str:
    """Return a ratio as a percentage with a sign: `+12.0%`, and `0.0%` without; a dash where it is not known."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    text = f"{100 * value:+.1f}%"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text.replace("-", "−")


def digits(value: float) -> str:
    """Return a number with three significant digits and no exponent; a dash where it is not known."""
    if not math.isfinite(value):
        return UNKNOWN
    if not value:
        return "0"
    value = float(f"{value:.3g}")  # so that 99.96 becomes 100, not 100.0
    magnitude = math.floor(math.log10(abs(value)))
    return f"{value:.{min(max(2 - magnitude, 0), 3)}f}"


# -------------------------------------------------------------------------------------------------
# A series as a line of blocks, and times of a clock.

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], cells: int) -> str:
    """Return a line of `cells` blocks for a series; each block is the mean of its share."""
    if not values or cells <= 0:
        return ""
    # Cut the series into shares as equal as whole samples allow, and scale their means to the eight blocks.
    cells = min(cells, len(values))
    edges = [round(index * len(values) / cells) for index in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    spread = high - low or 1.0
    return "".join(SPARKS[round((value - low) / spread * (len(SPARKS) - 1))] for value in means)


def moment(unix: float) -> str:
    """Return a time of the wall clock, seconds since 1970, to the minute; nothing for what no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix))
    except (OverflowError, ValueError, OSError):
        return ""


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


# -------------------------------------------------------------------------------------------------
# Fields in words: what a figure is called, and its value with the unit that its name gives it.

Number = float | int | str

_UNITS = {"_mhz": "MHz", "_celsius": "°C", "_watts": "W", "_cpus": "CPUs"}


def label(name: str) -> str:
    """Return a name of a field as words: `victims`, `collective seq id`."""
    return name.replace("_", " ")


def title(name: str) -> str:
    """Return a name of a field as words without its unit, which stands with the value: `step_seconds` is `step`."""
    for unit in ("_seconds", "_s", "_ratio", "_rank_hours", "_bytes_per_second", *_UNITS):
        if name.endswith(unit):
            return label(name.removesuffix(unit))
    return label(name)


def figure(name: str, value: Number | None) -> str:
    """Return a figure with the unit that its name gives it: `_seconds`, `_ratio`, `bytes`, ..."""
    if value is None:
        return UNKNOWN
    if isinstance(value, str | bool):
        return str(value)
    if name.endswith(("ratio", "share")):
        return percent(float(value), 1)
    if name.endswith("rank_hours"):
        return rank_time(3600 * float(value))
    if name.endswith("bytes_per_second"):
        return rate(float(value))
    if name.endswith(("_seconds", "_s")) or "_seconds_" in name:
        return duration(float(value))
    if name.endswith(("bytes", "bytes_each")):
        return size(float(value))
    number = str(value) if isinstance(value, int) else digits(value)
    return next((f"{number} {unit}" for suffix, unit in _UNITS.items() if name.endswith(suffix)), number)


# -------------------------------------------------------------------------------------------------
# Ranks and counts in words.


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as a list in which three or more in a row are shortened: `0-7, 9, 12-15`."""
    pieces = []
    # Ranks in a row have the same difference to their place in the list.
    for _, run in groupby(enumerate(sorted(set(ranks))), key=lambda item: item[1] - item[0]):
        numbers = [rank for _, rank in run]
        if len(numbers) > 2:
            pieces.append(f"{numbers[0]}-{numbers[-1]}")
        else:
            pieces.extend(str(number) for number in numbers)
    return ", ".join(pieces)


def name_ranks(ranks: Iterable[int], noun: str = "rank", plural: str = "") -> str:
    """Return ranks by name, or other things that have numbers: `rank 3`, `ranks 0-7 and 9`; "" where there is none."""
    distinct = set(ranks)
    head, comma, tail = rank_list(distinct).rpartition(", ")
    names = f"{head}{' and ' if comma else ''}{tail}"
    return f"{noun if len(distinct) == 1 else plural or noun + 's'} {names}" if distinct else ""


def name_vertices(vertices: Iterable[int], ranks: int) -> str:
    """Return vertices of a schedule by name: `rank 3`, `rank 0 and switch 8`.

    Args:
        vertices: Some of them, in any order.
        ranks: Vertices from here on are switches.
    """
    distinct = set(vertices)
    names = (
        name_ranks(vertex for vertex in distinct if vertex < ranks),
        name_ranks((vertex for vertex in distinct if vertex >= ranks), "switch", "switches"),
    )
    return " and ".join(filter(None, names))


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 call`, `2 calls`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def first_line(text: str, most: int = 200) -> str:
    """Return the first line of a text, cut where it is long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= most else line[: most - 1] + "…"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ring?)` where `name` is nearly one of the known names, else nothing.

    It goes behind the wrong name in an error. `h100` is nearly `dgx-h100`: what is a part of one known name is meant.
    """
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    if not near and len(name) >= 3:
        near = [full for full in known if name.lower() in full]
    return f" (did you mean {near[0]}?)" if len(near) == 1 else ""


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts `dump_2` before `dump_10`."""
    # No name makes a number that takes long to compare.
    pieces = re.findall("[0-9]+|[^0-9]", name + "\0")
    return tuple((0, int(piece[:18])) if "0" <= piece[0] <= "9" else (1, piece) for piece in pieces)


# -------------------------------------------------------------------------------------------------
# The words of torch and Gloo for what goes wrong between ranks: code in the wild looks for them in messages.

CLOSED = "Connection closed by peer"
MISMATCH = "Detected mismatch between collectives on ranks"
NOT_DONE = "Operation timed out!"


def timed_out(timeout_s: float) -> str:
    """Return that a wait of so many seconds was too short: `Timed out waiting 1500ms`."""
    return f"Timed out waiting {1000 * timeout_s:.0f}ms"


# -------------------------------------------------------------------------------------------------
# Sizes and counts as people write them, read in one way: `1GB` is 10^9, `1GiB` and `1G` are 2^30.

_SIZE = re.compile(r"^((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e\+?[0-9]+)?)\s*(?:([kmgtp])(ib?|b)?|b)?$", re.IGNORECASE)


def parse_size(text: str, *, binary: bool = False) -> float | None:
    """Return the bytes that a size stands for, 0 or more and finite; None: it is none.

    Args:
        text: Such as `1048576`, `16M`, `2 GiB`, `1.5e9`.
        binary: Take `16MB` for 16 · 2^20 as well, as nccl-tests' output and its tables mean it.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        return None
    decimal = (match[3] or "").lower() == "b" and not binary
    value = float(match[1]) * (1000.0 if decimal else 1024.0) ** " kmgtp".index((match[2] or " ").lower())
    return value if math.isfinite(value) else None


def size_bytes(text: str, option: str) -> float:
    """Return the bytes that a size stands for, more than 0.

    Args:
        text: As for `parse_size`.
        option: Where it was given, for the error.

    Raises:
        UsageError: It is no size, or not more than 0.
    """
    found = parse_size(text)
    if found is None:
        raise UsageError(f"{option} {text}: a size such as 1GB (10^9), 1GiB or 1G (2^30), or a number of bytes")
    if not found > 0:
        raise UsageError(f"{option} {text}: more than 0 bytes")
    return found


def parse_ranks_per_host(text: str) -> int | list[int]:
    """Return the ranks of every host: a number for all of them, or a list with one for each, such as `3,2,4`.

    Raises:
        UsageError: It is neither.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise UsageError(f"--ranks-per-host {text}: a number from 1 on, or one per host, such as 3,2,4")
    return counts if len(counts) > 1 else counts[0]

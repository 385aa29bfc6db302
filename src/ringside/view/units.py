"""Figures in words, as short as they may be: durations, sizes, a series as a line of blocks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence

SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], cells: int) -> str:
    """Return a line of `cells` blocks for a series; each block is the mean of its share."""
    if not values or cells <= 0:
        return ""
    cells = min(cells, len(values))
    edges = [round(index * len(values) / cells) for index in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in means)


def moment(unix: float) -> str:
    """Return a time of the wall clock, seconds since 1970, to the minute; nothing for what no calendar has."""
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(unix))
    except (OverflowError, ValueError, OSError):
        return ""


def ms(seconds: float | None) -> str:
    """Return a duration with the unit that suits it; seconds in."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds >= 10:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    value = 1e3 * seconds
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms" if value >= 0.1 else f"{1e3 * value:.0f} µs"


def size(nbytes: float) -> str:
    """Return a size in MB, KB or B."""
    return (
        f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} KB" if nbytes >= 1e3 else f"{nbytes:.0f} B"
    )


def clock(seconds: float) -> str:
    """Return minutes and seconds."""
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"

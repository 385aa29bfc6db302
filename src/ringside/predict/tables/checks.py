"""Row checks: which rows of a table are used, and in words why the others are not.

Every threshold here is a constant: a row is judged by its own figures and by the rows of its table, never by how well
a model would fit it. Two facts of physics find rows that agree with themselves and are still wrong: a message does not
take longer than a larger one, and not longer than sending it in pieces would.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ringside.predict.tables.table import ALL_REDUCE, BUS_FACTORS, Figure, Flag, Table, TableRow, bus_factor
from ringside.text import duration, rate

# -------------------------------------------------------------------------------------------------
# Rows that the rows around them show to be wrong.
#
# Two facts of physics: a message does not take longer than a larger one, and not longer than sending it in pieces.

SLOWER_THAN_LARGER = 2.0
SLOWER_THAN_PIECES = 1.4
SPIKE = 1.4  # beside both neighbours
LONG_RUN = 3  # more rows than this in a row are a regime of the cluster, unless they are worse than
REGIME = 2.5


def _split_implausible(rows: list[TableRow]) -> tuple[list[TableRow], list[Flag]]:
    """Flag rows slower than a larger message, or than the same bytes in pieces."""
    reasons: dict[int, str] = {}
    times = np.array([row.time_s for row in rows])
    sizes = np.array([row.size_bytes for row in rows])
    # Repeats of one size are sorted by time, or the order in the file would decide.
    order = np.lexsort((times, sizes))
    times, sizes = times[order], sizes[order]
    spikes: list[int] = []
    if len(times) >= 3:
        if times[0] > SPIKE * max(times[1], times[2]):  # it has no row before it, and is often a cold start
            spikes.append(0)
        before, here, after = times[:-2], times[1:-1], times[2:]
        # Where the next is below the one before as well, the next is the odd one.
        above = (here > SPIKE * before) & (here > SPIKE * after) & (after * SPIKE > before)
        spikes += [int(index) + 1 for index in np.flatnonzero(above)]
    for index in spikes:
        reasons[index] = f"{duration(times[index])} beside {duration(times[index + 1])} for a larger message: a spike"
    rates = sizes / times
    rules = (
        (SLOWER_THAN_LARGER, times, -times, "slower than a larger message, or that one is impossibly fast"),
        (SLOWER_THAN_PIECES, rates, rates, "slower than in smaller pieces, or those are impossibly fast"),
    )
    # One wrong row can make others look wrong by one rule and not by the other: the order that blames fewer is taken.
    tried = []
    for ordered in (rules, rules[::-1]):
        blamed: dict[int, str] = {}
        for tolerance, judged, better, words in ordered:
            known = reasons.keys() | blamed.keys()
            left = np.array([i for i in range(len(judged)) if i not in known], dtype=np.int64)
            blamed.update((int(left[place]), words) for place in _outside(judged[left], tolerance, better[left]))
        tried.append(blamed)
    for index, words in min(tried, key=len).items():
        reasons[index] = f"{duration(times[index])} for {sizes[index]:.0f} B: {words}"
    kept = [rows[order[i]] for i in range(len(rows)) if i not in reasons]
    return kept, [Flag(rows[order[i]].line, reasons[i], rows[order[i]].size_bytes) for i in sorted(reasons)]


def _outside(values: Floats, tolerance: float, better: Floats) -> list[int]:
    """Return the rows to leave out so that the rest never falls below its maximum so far by more than `tolerance`.

    Where either of two rows would do, the `better` stays: much makes a message slow and nothing makes it too fast.
    """
    ranks = np.argsort(np.argsort(better, kind="stable"), kind="stable")
    keep = largest_rising(values, tolerance, 1.0 + ranks / (2.0 * max(len(values), 1) ** 2))
    found: list[int] = []
    runs = np.split(np.arange(len(values)), np.flatnonzero(np.diff(keep)) + 1) if len(values) else []
    for run in runs:
        if keep[run[0]]:
            continue
        inside, worst = values[keep], 0.0
        for i in run:  # how far the row is below the largest before it, or above the smallest after it
            before, after = np.split(inside, [keep[:i].sum()])
            worst = max(worst, float(before.max(initial=0.0) / values[i]), float(values[i] / after.min(initial=np.inf)))
        if len(run) <= LONG_RUN or worst >= REGIME:
            found.extend(int(i) for i in run)
    return found


def largest_rising(values: Floats, tolerance: float, worth: Floats) -> NDArray[np.bool_]:
    """Return a largest subset in which no value is below the largest before it divided by `tolerance`.

    Args:
        values: Positive, float64 [n].
        tolerance: 1: a non-decreasing subset.
        worth: Of each value, float64 [n]; the subset's sum is greatest.

    Returns:
        Which values are in it, bool [n]. Time and memory O(n²) and O(n).
    """
    n = len(values)
    best = np.zeros(n)  # of subsets whose maximum so far is value i
    parent = np.full(n, -1, dtype=np.int64)
    for j in range(n):
        below = np.flatnonzero(values[:j] <= values[j])
        within = (values[:j] > values[j]) & (values[:j] <= tolerance * values[j])
        best[j] = worth[j]
        if len(below):
            parent[j] = below[np.argmax(best[below])]
            best[j] += best[parent[j]]
        best[:j][within] += worth[j]
    keep = np.zeros(n, dtype=np.bool_)
    top, end = (int(np.argmax(best)) if n else -1), n
    while top >= 0:
        between = np.arange(top + 1, end)
        keep[top] = True
        keep[between[(values[between] < values[top]) & (values[between] * tolerance >= values[top])]] = True
        top, end = int(parent[top]), top
    return keep


SLACK = 0.012  # of stated bandwidths, beyond their last digit: both are often printed from rounded figures
MOST_RANKS = 1 << 20
FASTEST = 20e12  # bytes per second and rank: ten times the fastest link there is
LONGEST_S = 1e5

Floats = NDArray[np.float64]


def check_rows(table: Table) -> Table:
    """Return the table with its rows sorted by size, what is wrong with others flagged, and its ranks known.

    Where the table does not name a number of ranks, it follows from busbw/algbw (2(n-1)/n for all-reduce).
    """
    # A row by itself, and rows that stand there twice.
    kept: dict[tuple[float, float], TableRow] = {}
    flags, repeated = [], []
    for row in table.rows:
        if reason := _impossible(row):
            flags.append(Flag(row.line, reason, row.size_bytes))
            continue
        first = kept.setdefault((row.size_bytes, row.time_s), row)
        if first is not row:
            repeated.append(Flag(row.line, f"the same size and time as line {first.line}", row.size_bytes))
    flags += repeated
    # The bandwidths that a row states, by the ranks that most rows agree on.
    table = _with_ranks(table, list(kept.values()))
    rows = []
    for row in kept.values():
        if reason := _disagreement(row, table):
            flags.append(Flag(row.line, reason, row.size_bytes))
        else:
            rows.append(row)
    # Rows by those around them.
    rows.sort(key=lambda row: row.size_bytes)
    if table.collective in BUS_FACTORS or table.collective == "p2p_latency":
        rows, more = _split_implausible(rows)
        flags += more
    return table.with_flags(rows, flags)


def _impossible(row: TableRow) -> str:
    """Return what is wrong with a row whatever stands around it; empty: nothing."""
    if row.size_bytes <= 0:
        return "size 0: nothing was moved" if row.size_bytes == 0 else "a negative size"
    if not float(row.size_bytes).is_integer():  # nor is infinity
        return f"size {row.size_bytes:g} is no whole number of bytes; are the columns mixed up?"
    if not row.time_s > 0:
        return f"time {duration(row.time_s)}: a call takes longer than nothing"
    if row.time_s > LONGEST_S:
        return f"time {row.time_s:g} s: longer than a day; is the unit right?"
    if row.size_bytes / row.time_s > FASTEST:
        return f"{rate(row.size_bytes / row.time_s)}: faster than any link; are time and unit right?"
    return ""


# ------------------------------------------------------------------------------------------------ stated bandwidths

_UNITS = (
    (8.0, "in Gbit/s (bits, not bytes)"),
    (1 / 8, "an eighth: is the size in bits?"),
    (1e3, "a thousand times: is the time in ms, not µs?"),
    (1e-3, "a thousandth: is the time in ns, not µs?"),
    (1e6, "a million times: is the time in s, not µs?"),
    (1 / 1.073741824, "in GiB/s, not GB/s"),
    (1.073741824, "in GB/s of sizes that are GiB"),
    (1.048576, "1.0486 times: MiB for MB"),
    (1 / 1.048576, "1/1.0486: MiB for MB"),
)


def _disagreement(row: TableRow, table: Table) -> str:
    """Return what is wrong between a row's time and the bandwidths it states; empty: nothing."""
    true = row.size_bytes / row.time_s
    factor = bus_factor(table.collective, table.ranks) if table.ranks else None
    if row.algbw is not None and not _agree(row.algbw, true):
        return f"algbw {rate(row.algbw.value)} is not size/time = {rate(true)}{_hint(row.algbw.value / true, factor)}"
    if row.busbw is None or factor is None:
        return ""
    if row.algbw is None and not _agree(row.busbw, true * factor):
        ratio = row.busbw.value / (true * factor) if factor else math.inf
        return (
            f"busbw {rate(row.busbw.value)} is not {factor:.3f} size/time = {rate(true * factor)}{_hint(ratio, None)}"
        )
    if not _agree(row.busbw, true * factor):
        ratio = row.busbw.value / true
        mismatch = f"busbw/algbw = {ratio:.4g} where {table.ranks} ranks give {factor:.4g}"
        other = _ranks_of(ratio, table.collective)
        is_coarse = row.busbw.half_digit > 0.02 * row.busbw.value
        return mismatch if other is None or is_coarse else f"{mismatch}; it is that of {other} ranks"
    return ""


def _agree(stated: Figure, true: float) -> bool:
    return abs(stated.value - true) <= 2 * stated.half_digit + SLACK * true


def _hint(ratio: float, factor: float | None) -> str:
    for unit, words in _UNITS:
        if abs(ratio / unit - 1) < 0.015:
            return f": {words}"
    if factor is not None and factor > 1.05 and abs(ratio / factor - 1) < 0.015:
        return ": it is the bus bandwidth"
    return ""


# ------------------------------------------------------------------------------------------------ ranks


def _with_ranks(table: Table, rows: Sequence[TableRow]) -> Table:
    """Return the table with ranks and collective from busbw/algbw where it names none."""
    if table.collective not in BUS_FACTORS:
        return table
    if table.ranks == 0:
        ranks = infer_ranks(rows, table.collective)
        if ranks == 0 and table.collective == ALL_REDUCE:
            gathered = infer_ranks(rows, "all_gather")
            return replace(table, ranks=gathered, collective="all_gather") if gathered else table
        return replace(table, ranks=ranks)
    ratios = _ratios(rows)
    if table.collective == ALL_REDUCE and len(ratios) and table.ranks > 1:
        # Said nowhere, yet plainly the other collectives' factor: their tables have the same columns.
        near = []
        for kind in (ALL_REDUCE, "all_gather", "sendrecv"):
            factor = bus_factor(kind, table.ranks)
            if sum(abs(ratio - factor) <= spread + 0.01 * factor for ratio, spread in ratios) * 2 > len(ratios):
                near.append(kind)
        if near and near[0] != ALL_REDUCE:
            return replace(table, collective=near[0])
    return table


def _ratios(rows: Sequence[TableRow]) -> list[tuple[float, float]]:
    """Return busbw/algbw of rows precise enough to infer ranks from, each with its uncertainty."""
    found = []
    for row in rows:
        if row.busbw is None or row.busbw.value <= 0:
            continue
        true = row.size_bytes / row.time_s
        if row.algbw is not None and not _agree(row.algbw, true):
            continue
        algbw = row.algbw if row.algbw is not None and row.algbw.value > 0 else Figure(true, 0.0005 * true)
        ratio = row.busbw.value / algbw.value
        spread = ratio * (row.busbw.half_digit / row.busbw.value + algbw.half_digit / algbw.value)
        if spread < 0.05:
            found.append((ratio, spread))
    return found


def infer_ranks(rows: Sequence[TableRow], collective: str = ALL_REDUCE) -> int:
    """Return the number of ranks that busbw/algbw of most rows stands for; 0 where they stand for none."""
    votes: Counter[int] = Counter()
    for ratio, spread in _ratios(rows):
        low, high = (_ranks_of(ratio + sign * spread, collective) for sign in (-1, 1))
        exact = _ranks_of(ratio, collective)
        if low is None or exact is None:
            continue
        high = min(high if high is not None else MOST_RANKS, 4 * low, MOST_RANKS)
        for ranks in range(max(low, 2), max(high, exact) + 1):
            if abs(bus_factor(collective, ranks) - ratio) <= spread:
                votes[ranks] += 1
    if not votes:
        return 0
    most = max(votes.values())
    best = sorted(ranks for ranks, count in votes.items() if count == most)
    # Several counts fit where figures are coarse: take the one machines have, which is made of eights.
    return max(best, key=lambda ranks: ((ranks & -ranks).bit_length(), -ranks))


def _ranks_of(ratio: float, collective: str) -> int | None:
    """Return the number of ranks for which busbw/algbw is nearest to a ratio; None: it is that of no number."""
    a, b = BUS_FACTORS[collective]
    if b == 0 or not 0 < ratio < a:
        return None
    ranks = round(b / (ratio - a))
    return ranks if 2 <= ranks <= MOST_RANKS else None

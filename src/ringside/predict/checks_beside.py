"""Rows that the rows around them show to be wrong.

Two facts of physics: a message does not take longer than a larger one, and not longer than sending it in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.predict.tables import Flag, Row

SLOWER_THAN_LARGER = 2.0
SLOWER_THAN_PIECES = 1.4
SPIKE = 1.4  # beside both neighbours
LONG_RUN = 3  # more rows than this in a row are a regime of the cluster, unless they are worse than
REGIME = 2.5

Floats = NDArray[np.float64]


def implausible(rows: list[Row]) -> tuple[list[Row], list[Flag]]:
    """Flag rows slower than a larger message, or than the same bytes in pieces."""
    reasons: dict[int, str] = {}
    times = np.array([row.time_s for row in rows])
    sizes = np.array([row.size_bytes for row in rows])
    # Repeats of one size are sorted by time, or the order in the file would decide.
    order = np.lexsort((times, sizes))
    times, sizes = times[order], sizes[order]
    for index in _spikes(times):
        reasons[index] = f"{_us(times[index])} beside {_us(times[index + 1])} for a larger message: a spike"
    rules = (
        (SLOWER_THAN_LARGER, times, -times, "slower than a larger message, or that one is impossibly fast"),
        (
            SLOWER_THAN_PIECES,
            sizes / times,
            sizes / times,
            "slower than in smaller pieces, or those are impossibly fast",
        ),
    )
    # One wrong row can make others look wrong by one rule and not by the other: the order that blames fewer is taken.
    tried = [_blamed(each, set(reasons)) for each in (rules, rules[::-1])]
    for index, words in min(tried, key=len).items():
        reasons[index] = f"{_us(times[index])} for {sizes[index]:.0f} B: {words}"
    kept = [rows[order[i]] for i in range(len(rows)) if i not in reasons]
    return kept, [Flag(rows[order[i]].line, reasons[i], rows[order[i]].size_bytes) for i in sorted(reasons)]


def _blamed(rules: Sequence[tuple[float, Floats, Floats, str]], known: set[int]) -> dict[int, str]:
    """Return what each rule in turn has against the rows that are left, by row."""
    found: dict[int, str] = {}
    for tolerance, judged, better, words in rules:
        left = np.array([i for i in range(len(judged)) if i not in known and i not in found], dtype=np.int64)
        found.update((int(left[place]), words) for place in _outside(judged[left], tolerance, better[left]))
    return found


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"


def _spikes(times: Floats) -> list[int]:
    """Return rows that stand above both neighbours; the first above the next two (it is often a cold start)."""
    if len(times) < 3:
        return []
    found = [0] if times[0] > SPIKE * max(times[1], times[2]) else []
    before, here, after = times[:-2], times[1:-1], times[2:]
    # Where the next is below the one before as well, the next is the odd one.
    above = (here > SPIKE * before) & (here > SPIKE * after) & (after * SPIKE > before)
    return found + [int(index) + 1 for index in np.flatnonzero(above)]


def _outside(values: Floats, tolerance: float, better: Floats) -> list[int]:
    """Return the rows to leave out so that the rest never falls below its maximum so far by more than `tolerance`.

    Where either of two rows would do, the `better` stays: much makes a message slow and nothing makes it too fast.
    """
    ranks = np.argsort(np.argsort(better, kind="stable"), kind="stable")
    keep = rising(values, tolerance, 1.0 + ranks / (2.0 * max(len(values), 1) ** 2))
    found: list[int] = []
    runs = np.split(np.arange(len(values)), np.flatnonzero(np.diff(keep)) + 1) if len(values) else []
    for run in runs:
        if keep[run[0]]:
            continue
        inside = values[keep]
        worst = max(_violation(values[i], inside[: keep[:i].sum()], inside[keep[:i].sum() :]) for i in run)
        if len(run) <= LONG_RUN or worst >= REGIME:
            found.extend(int(i) for i in run)
    return found


def _violation(value: float, before: Floats, after: Floats) -> float:
    return float(max(before.max(initial=0.0) / value, value / after.min(initial=np.inf)))


def rising(values: Floats, tolerance: float, worth: Floats | None = None) -> NDArray[np.bool_]:
    """Return a largest subset in which no value is below the largest before it divided by `tolerance`.

    Args:
        values: Positive, float64 [n].
        tolerance: 1 asks for a non-decreasing subset.
        worth: Of each value, float64 [n]; the subset's sum is greatest. None: all are worth 1.

    Returns:
        Which values are in it, bool [n]. Time and memory O(n²) and O(n).
    """
    n = len(values)
    worth = np.ones(n) if worth is None else worth
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

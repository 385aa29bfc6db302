"""Rows of `ringside top`: which ranks in which order, and each as cells. Needs no textual, for `--once`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.cells import set_cell_size

from ringside.monitor.groups import describe_place, place_in_mesh
from ringside.text import SPARKS, duration, signed_percent
from ringside.view.run.live import RankNow
from ringside.view.tui.console import printable
from ringside.view.tui.source import Snapshot

SORTS = ("own", "wait", "wire", "excess", "rank")
_FIELDS = {"own": "own_seconds", "wait": "wait_seconds", "wire": "wire_seconds", "excess": "excess_ratio"}
LEAST_SPREAD = 0.25
"""The lines of blocks share one scale; their range is at least this share of the shortest own time."""

MARK = "▌"


@dataclass(frozen=True)
class SortOrder:
    """Which ranks are shown, and in which order.

    Args:
        sort: One of `SORTS`; times and excess begin with the largest, ranks with 0, where a mesh is known by it: its
            first stage, and in that beside each other those that do the same work.
        reverse: The other way round.
        filter: Which ranks: `3`, `8-15`, a part of a host's name or of a verdict's kind, `pp1` or `pp=1` of a
            coordinate; any of several between commas or spaces; all where there is nothing to find.
    """

    sort: str = "excess"
    reverse: bool = False
    filter: str = ""

    def shows(self, rank: RankNow) -> bool:
        """Whether the filter means a rank."""
        places = {f"{name}{index}".lower() for name, index in rank.coordinates.items()}
        terms = [term for term in re.split(r"[,\s]+", self.filter.lower()) if term]
        for term in terms:
            numbers = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", term)
            if numbers:
                if int(numbers[1]) <= rank.rank <= int(numbers[2] or numbers[1]):
                    return True
            elif (
                term.replace("=", "") in places
                or term in rank.host.lower()
                or any(term in kind or term in kind.replace("_", "-") for kind in rank.verdicts)
            ):
                return True
        return not terms


def arrange_ranks(ranks: Sequence[RankNow], order: SortOrder) -> list[RankNow]:
    """Return the ranks to show, in order; what is not known comes last either way."""
    shown = [rank for rank in ranks if order.shows(rank)]
    if order.sort == "rank":
        return sorted(shown, key=lambda rank: place_in_mesh(rank.coordinates, rank.rank), reverse=order.reverse)
    field, sign = _FIELDS[order.sort], 1.0 if order.reverse else -1.0

    def key(rank: RankNow) -> tuple[bool, float]:
        value = getattr(rank, field)
        return (False, sign * value) if math.isfinite(value) else (True, 0.0)

    return sorted(shown, key=key)


@dataclass(frozen=True)
class Columns:
    """How wide each column is, in cells; 0: left out.

    Columns go when there is no room: the line of blocks, the host, wire, wait, the place in the mesh, the verdict's
    kind, own, in this order.
    """

    rank: int
    place: int
    host: int
    own: int
    wait: int
    wire: int
    excess: int
    spark: int
    verdict: int


TIME, EXCESS, FEWEST_SPARKS, MOST_SPARKS = 9, 10, 8, 60


def fit_columns(snapshot: Snapshot, width: int) -> Columns:
    """Return columns for a run that fit `width` cells."""
    hosts = {rank.host for rank in snapshot.ranks}
    host = min(max(map(len, ("host", *hosts))), 16) + 2 if len(hosts) > 1 else 0
    place = max((len(describe_place(rank.coordinates)) for rank in snapshot.ranks), default=0)
    verdict = max((len(_kinds(rank)) for rank in snapshot.ranks if rank.verdicts), default=0)
    sizes = {
        "rank": max(len(str(max(len(snapshot.ranks) - 1, 0))), 4) + 1, "excess": EXCESS, "own": TIME,
        "verdict": min(verdict, 24) + 2 if verdict else 0, "place": min(place, 36) + 2 if place else 0, "wait": TIME,
        "wire": TIME, "host": host,
    }  # fmt: skip
    # In the order of importance: the first that does not fit is left out, and so on.
    room = width
    for name, size in sizes.items():
        sizes[name] = size if size <= room else 0
        room -= sizes[name]
    spark = min(room - 2, MOST_SPARKS) if room - 2 >= FEWEST_SPARKS else 0
    return Columns(spark=spark, **sizes)


def heading_line(columns: Columns, order: SortOrder, window: str = "") -> str:
    """Return the line above the rows; the column that they are sorted by has an arrow.

    Args:
        columns: From `fit_columns`.
        order: How the rows are sorted.
        window: What the figures are medians of, said where there is room.
    """
    arrow = "↓" if order.reverse == (order.sort == "rank") else "↑"
    names = {name: name + arrow * (name == order.sort) for name in vars(columns)}
    said = f"(medians, {window})  own time"
    names["spark"] = said if window and len(said) <= columns.spark else "own time"
    return _in_columns(columns, names)


def rank_line(rank: RankNow, columns: Columns, sparks: str = "") -> str:
    """Return one rank's line, without colours; one with an open verdict has a bar at its left and the verdict's name.

    Args:
        rank: The rank.
        columns: From `fit_columns`.
        sparks: From `Sparks`.
    """
    texts = {name: duration(getattr(rank, field)) for name, field in _FIELDS.items()}
    texts |= {"rank": str(rank.rank), "excess": signed_percent(rank.excess_ratio), "spark": sparks}
    texts |= {"place": printable(describe_place(rank.coordinates)), "host": printable(rank.host)}
    line = _in_columns(columns, {**texts, "verdict": _kinds(rank)})
    return MARK + line[1:] if rank.verdicts and columns.rank else line


def _in_columns(columns: Columns, texts: Mapping[str, str]) -> str:
    """Return texts in their columns: figures end at the right, words begin at the left behind two blanks."""
    line = ""
    for name, width in vars(columns).items():
        if not width:
            continue
        if name == "rank" or name in _FIELDS:
            line += f"{texts[name]:>{width}}"
        else:
            line += "  " + set_cell_size(texts[name], width if name == "spark" else width - 2)
    return line


def _kinds(rank: RankNow) -> str:
    return ", ".join(kind.replace("_", " ") for kind in rank.verdicts)


class Sparks:
    """Series as lines of blocks, all on one scale: a rank that is slow stands out, noise stays low.

    Args:
        steps: The training steps, ascending, int64 [steps].
        values: What is drawn, [steps, lines]; NaN where nothing is known.
        cells: Blocks of a line at most.
    """

    def __init__(self, steps: NDArray[np.int64], values: NDArray[np.floating[Any]], cells: int) -> None:
        self._means = _means(steps, values, cells)
        known = self._means[np.isfinite(self._means)]
        self._low = float(known.min()) if known.size else 0.0
        # Single hiccups do not press all others flat.
        high = float(np.quantile(known, 0.995)) if known.size else 0.0
        self._scale = (len(SPARKS) - 1) / max(high - self._low, LEAST_SPREAD * self._low, 1e-9)

    def line(self, rank: int) -> str:
        """Return one line, here a rank's; a gap where nothing is known."""
        if rank >= self._means.shape[1]:
            return ""
        top = len(SPARKS) - 1
        return "".join(
            SPARKS[min(round((value - self._low) * self._scale), top)] if math.isfinite(value) else " "
            for value in self._means[:, rank].tolist()
        )


def _means(steps: NDArray[np.int64], own: NDArray[np.floating[Any]], cells: int) -> NDArray[np.float64]:
    """Return means over groups of as many steps as it takes, [at most cells, ranks].

    Groups begin at multiples of their length: while a run goes on, lines shift and do not flicker.
    """
    if not len(steps) or cells <= 0:
        return np.empty((0, own.shape[1]))
    # Training steps per group, so that all of them fit the cells.
    each = (int(steps[-1]) - int(steps[0])) // cells + 1
    groups = steps // each
    _, starts = np.unique(groups, return_index=True)
    values = own.astype(np.float64)
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts, axis=0)
    counts = np.add.reduceat(known, starts, axis=0, dtype=np.int64)
    means: NDArray[np.float64] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means[-cells:]  # the oldest group may be one too many

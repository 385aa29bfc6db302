"""Scores as a page: what was measured beside what was predicted, in time and bandwidth, and by how much it is off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.predict.laws.calibrate import Prediction
from ringside.predict.score.score import Errors, Score, line_flags, summary
from ringside.predict.tables.table import bus_factor
from ringside.text import digits, duration, size
from ringside.view.html.curves import Axis, Curve, curves
from ringside.view.html.page import footer, page, table, tiles, verdict
from ringside.view.schedule.svg import asset

Floats = NDArray[np.float64]

MOST_TABLES = 24
MODES = {
    "hold-out": "rows 0, 2, 4, ... fitted, 1, 3, 5, ... scored",
    "larger sizes": "small sizes fitted, larger ones scored",
    "other scale": "another scale of the cluster fitted",
    "preset": "nothing fitted",
}
NOTE = (
    "Dots are rows that had no part in the fit; rows that failed the checks are not shown. The band is to hold 95 % of "
    "them. Off by: measured over predicted, less one; what lies above 0 took longer than predicted."
)


def score_page(scores: Sequence[Score]) -> str:
    """Return the page; one file that needs no other. Of more than 24 tables the first have curves."""
    total, scored = summary(scores), [one for one in scores if one.errors is not None]
    body = [
        verdict("predictions beside measurements", _headline(total.mape, len(scored)), _lines(scores)),
        tiles(_tiles(scores)),
        _overview(scored),
        *(part for at, one in enumerate(scored[:MOST_TABLES]) for part in _pictures(one, at)),
        _refused(scores),
        footer(NOTE),
    ]
    return page("Predictions beside measurements", "predict score", body, meta=_mode(scores), js=asset("report.js"))


def percent(value: float | None) -> str:
    """Return a ratio as a percentage of two or three digits."""
    return "–" if value is None else f"{digits(100 * value)} %"


def _mode(scores: Sequence[Score]) -> str:
    return next((MODES.get(one.mode, one.mode) for one in scores if one.errors is not None), "")


def _headline(mape: float | None, tables: int) -> str:
    if mape is None:
        return "No table could be scored."
    return f"{percent(mape)} off" + (f", the median of {tables} tables" if tables > 1 else "")


def _lines(scores: Sequence[Score]) -> Iterator[tuple[str, str]]:
    total = summary(scores)
    yield "How", _mode(scores)
    yield "Band", f"holds {percent(total.band_coverage)} of {total.rows} rows; it is to hold 95 %"
    others = [f"{name.replace('_', ' ')} {percent(value)}" for name, value in total.baselines.items() if value]
    yield "Beside it", ", ".join(others)


def _tiles(scores: Sequence[Score]) -> Iterator[tuple[str, str, str]]:
    total = summary(scores)
    yield "mean error", percent(total.mape), "median over tables"
    yield "from 1 MB up", percent(total.mape_large), "median over tables"
    yield "bias", percent(total.bias), "below 0: predicted too fast"
    yield "rows not used", str(sum(len(line_flags(one.table)) for one in scores)), "they fail the checks"


def _overview(scored: Sequence[Score]) -> str:
    rows = [_row(one, one.errors) for one in scored if one.errors is not None]
    columns = ("table", "ranks", "rows scored", "off", "from 1 MB", "in band", "worst at")
    return table("Every table", columns, rows) if rows else ""


def _row(one: Score, errors: Errors) -> tuple[str, ...]:
    counts = one.table.name, str(one.table.ranks or "?"), str(len(one.scored))
    ratios = map(percent, (errors.mape, errors.mape_large, one.band_coverage))
    return *counts, *ratios, size(errors.worst_size_bytes)


def _pictures(one: Score, at: int) -> Iterator[str]:
    told = one.prediction
    if told is None or not len(one.scored):
        return
    measured = np.array([row.time_s for row in one.scored])
    factor = bus_factor(one.table.collective, one.table.ranks) if one.table.ranks > 1 else 1.0
    name, said = one.table.name, one.words
    yield '<div class="pair">'
    yield curves(f"time-{at}", f"{name}: time", _both(told, measured), Axis(size), Axis(duration), said)
    rates = _both(told, measured, factor)
    what = "bus bandwidth" if one.table.ranks > 1 else "bandwidth"
    yield curves(f"rate-{at}", f"{name}: {what}, GB/s", rates, Axis(size), Axis(_giga, log=False, low=0.0))
    yield "</div>"
    ratio = Axis(percent, log=False, low=0.0)
    yield curves(f"off-{at}", f"{name}: off by", _residuals(told, measured), Axis(size), ratio)


def _both(told: Prediction, measured: Floats, factor: float | None = None) -> list[Curve]:
    """Return what was predicted and what was measured: times, or with a factor rates."""
    if factor is None:
        ends = told.times_s, told.low_s, told.high_s
        seen = measured
    else:
        moved = factor * told.sizes
        ends = moved / told.times_s, moved / told.high_s, moved / told.low_s
        seen = moved / measured
    line = Curve("predicted, 95 % band", told.sizes, *ends[:1], "s0", *ends[1:])
    return [line, Curve("measured", told.sizes, seen, "culprit", dots=True)]


def _residuals(told: Prediction, measured: Floats) -> list[Curve]:
    low, high = told.low_s / told.times_s - 1, told.high_s / told.times_s - 1
    band = Curve("predicted, 95 % band", told.sizes, np.zeros_like(told.sizes), "s0", low, high)
    return [band, Curve("measured", told.sizes, measured / told.times_s - 1, "culprit", dots=True)]


def _refused(scores: Sequence[Score]) -> str:
    rows = [(one.table.name, one.refused) for one in scores if one.refused]
    rows += [(f"{one.table.name}, line {flag.line}", flag.reason) for one in scores for flag in line_flags(one.table)]
    return table("Not used", ("what", "why"), rows) if rows else ""


def _giga(value: float) -> str:
    return digits(value / 1e9)

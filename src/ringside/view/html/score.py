"""Scores as a page: what was measured beside what was predicted, in time and bandwidth, and by how much it is off."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.predict.score import Score, line_flags, summary
from ringside.predict.tables.table import bus_factor
from ringside.text import duration, giga, percent, signed_percent, size
from ringside.view.html.curves import Axis, Curve, curves
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.html.page import footer, render_page, table, tiles, verdict_section

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
    total = summary(scores)
    scored = [(score, score.errors) for score in scores if score.errors is not None]
    headline = "No table could be scored."
    if total.mape is not None:
        headline = f"{percent(total.mape, 1)} off"
        headline += f", the median of {len(scored)} tables" if len(scored) > 1 else ""
    mode = next((MODES.get(score.mode, score.mode) for score, _ in scored), "")
    baselines = [f"{name.replace('_', ' ')} {percent(value, 1)}" for name, value in total.baselines.items() if value]
    lines = [
        ("How", mode),
        ("Band", f"holds {percent(total.band_coverage, 1)} of {total.rows} rows; it is to hold 95 %"),
        ("Beside it", ", ".join(baselines)),
    ]
    figures = [
        ("mean error", percent(total.mape, 1), "median over tables"),
        ("from 1 MiB up", percent(total.mape_large, 1), "median over tables"),
        ("bias", signed_percent(total.bias), "below 0: predicted too fast"),
        ("rows not used", str(sum(len(line_flags(score.table)) for score in scores)), "they fail the checks"),
    ]
    overview = [
        (
            score.table.name,
            str(score.table.ranks or "?"),
            str(len(score.scored)),
            *(percent(share, 1) for share in (errors.mape, errors.mape_large, score.band_coverage)),
            size(errors.worst_size_bytes),
        )
        for score, errors in scored
    ]
    columns = ("table", "ranks", "rows scored", "off", "from 1 MiB", "in band", "worst at")
    unused = [(score.table.name, score.refused) for score in scores if score.refused]
    unused += [
        (f"{score.table.name}, line {flag.line}", flag.reason) for score in scores for flag in line_flags(score.table)
    ]
    sections = [
        verdict_section("predictions beside measurements", headline, lines),
        tiles(figures),
        table("Every table", columns, overview) if overview else NOTHING,
        *(_table_curves(score, index) for index, (score, _) in enumerate(scored[:MOST_TABLES])),
        table("Not used", ("what", "why"), unused) if unused else NOTHING,
        footer(NOTE),
    ]
    return render_page("Predictions beside measurements", "predict score", mode, sections, scripts=("report.js",))


def _table_curves(score: Score, index: int) -> Markup:
    """Return time, bandwidth and error of one table over its sizes; `index` keeps the figures' ids apart."""
    prediction, table = score.prediction, score.table
    if prediction is None or not len(score.scored):
        return NOTHING
    measured = np.array([row.time_s for row in score.scored])
    factor = bus_factor(table.collective, table.ranks) if table.ranks > 1 else 1.0
    noun = "bus bandwidth" if table.ranks > 1 else "bandwidth"
    sizes, low, high = prediction.sizes, prediction.low_s, prediction.high_s
    moved = factor * sizes
    times = _beside_measured(sizes, prediction.times_s, low, high, measured)
    # The shortest time is the highest rate.
    rates = _beside_measured(sizes, moved / prediction.times_s, moved / high, moved / low, moved / measured)
    error = np.stack([low, high, measured]) / prediction.times_s - 1
    errors = _beside_measured(sizes, np.zeros_like(sizes), *error)
    return fill(
        '<div class="pair">{}{}</div>{}',
        curves(f"time-{index}", f"{table.name}: time", times, Axis(size), Axis(duration), score.words),
        curves(
            f"rate-{index}",
            f"{table.name}: {noun}, GB/s",
            rates,
            Axis(size),
            Axis(giga, log=False, low=0.0),
        ),
        curves(
            f"off-{index}",
            f"{table.name}: off by",
            errors,
            Axis(size),
            Axis(lambda value: percent(value, 1), log=False, low=0.0),
        ),
    )


def _beside_measured(sizes: Floats, predicted: Floats, low: Floats, high: Floats, measured: Floats) -> list[Curve]:
    """A line with its band, and dots."""
    line = Curve("predicted, 95 % band", sizes, predicted, "s0", low, high)
    return [line, Curve("measured", sizes, measured, "culprit", dots=True)]

"""Curves over a logarithmic axis: sizes, hosts, buckets. Lines with bands, and dots for what was measured.

Like the report's charts the plot stretches with the page and its labels are HTML; `report.js` shows numbers on hover.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.view.html.charts import UNITS, ticks
from ringside.view.html.markup import NOTHING, Markup, embed_json, fill
from ringside.view.html.page import note_line

Floats = NDArray[np.float64]
Text = Callable[[float], str]

MOST_TICKS = 5
ROOM = 0.04  # above and below, as a share of what is shown


@dataclass(frozen=True, eq=False)
class Curve:
    """One line, or the dots of what was measured.

    Args:
        name: In the legend.
        x: Where, more than 0, ascending.
        y: What, NaN where nothing is known.
        style: CSS class of its colour: `s0` to `s7`, `culprit`.
        low: Lower end of its band; None: it has none.
        high: Upper end.
        dots: Dots instead of a line.
    """

    name: str
    x: Floats
    y: Floats
    style: str
    low: Floats | None = None
    high: Floats | None = None
    dots: bool = False


@dataclass(frozen=True)
class Axis:
    """One axis.

    Args:
        text: How a value is written.
        log: Whether it is logarithmic.
        low: The axis holds this value; None: nothing in particular.
        marks: Where it is labelled; empty: at round values.
    """

    text: Text
    log: bool = True
    low: float | None = None
    marks: tuple[float, ...] = ()


def curves(identity: str, title: str, lines: Sequence[Curve], x: Axis, y: Axis, note: str = "") -> Markup:
    """Return a `<figure>`; readable without scripts, with numbers on hover.

    Args:
        identity: HTML id, unique in the page.
        title: The caption.
        lines: The most important last: it is drawn on top.
        x: The horizontal axis.
        y: The vertical one.
        note: Below the caption.
    """
    across = _Scale(np.concatenate([line.x for line in lines]), x, 0.0)
    # Bands are shown whole, so their ends count for the height as the lines do.
    heights = [end for line in lines for end in (line.y, line.low, line.high) if end is not None]
    up = _Scale(np.concatenate(heights), y, ROOM)
    spoken = "; ".join(
        f"{line.name}: {y.text(float(line.y[-1]))} at {x.text(float(line.x[-1]))}" for line in lines[-6:]
    )
    return fill(
        """<figure class="chart curves" id="{identity}"><figcaption>{title}</figcaption>{note}
<div class="legend">{legend}</div>
<div class="plot" tabindex="0" role="img" aria-label="{title}. {spoken}.">
<div class="y">{levels}</div>
<div class="area"><svg viewBox="0 0 {units} {units}" preserveAspectRatio="none" aria-hidden="true">{grid}{shapes}</svg>
<div class="cursor" hidden></div><div class="tip" hidden></div></div>
<div class="xs">{places}</div>
</div><script type="application/json">{data}</script></figure>""",
        identity=identity,
        title=title,
        note=note_line(note),
        legend=[
            fill('<span class="key {}{}"><i></i>{}</span>', line.style, " dotted" if line.dots else "", line.name)
            for line in lines
        ],
        spoken=spoken,
        levels=[_tick(value, up, "bottom", y.text) for value in up.ticks],
        units=UNITS,
        grid=[fill('<path class="grid" d="M0 {:.1f}H{}"/>', UNITS - up.place(v), UNITS) for v in up.ticks],
        shapes=[_draw_line(line, across, up) for line in lines],
        places=[_tick(value, across, "left", x.text) for value in across.ticks],
        data=embed_json(_hover_data(lines, across, x, y)),
    )


class _Scale:
    """Values to places, 0 to `UNITS`."""

    def __init__(self, values: Floats, axis: Axis, room: float) -> None:
        known = values[np.isfinite(values) & ((values > 0) | (not axis.log))]
        if axis.low is not None:
            known = np.append(known, axis.low)
        self._log = axis.log
        shown = np.log10(known) if axis.log else known
        low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
        more = room * ((high - low) or 1.0)
        self.low, self.high = low - more, high + more
        self.ticks = list(axis.marks) or (_decades if axis.log else ticks)(self.low, self.high)

    def place(self, value: float) -> float:
        shown = math.log10(value) if self._log else value
        return UNITS * (shown - self.low) / ((self.high - self.low) or 1.0)


def _decades(low: float, high: float) -> list[float]:
    """Return powers of ten between two logarithms, every second, third ... of many, halves too of few."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    # Within two decades 1, 2 and 5 of each are labelled.
    if last - first < 2:
        steps = [f * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for f in (1, 2, 5)]
        return [v for v in steps if low - 1e-9 <= math.log10(v) <= high + 1e-9]
    step = math.ceil((last - first + 1) / MOST_TICKS)
    return [10.0**power for power in range(first, last + 1, step)]


def _draw_line(line: Curve, across: _Scale, up: _Scale) -> Markup:
    if line.dots:
        places = "".join(f"M{a} {b}h0" for a, b in _places(line.x, line.y, across, up))
        return fill('<path class="dots {}" d="{}"/>', line.style, places)
    band = NOTHING
    if line.low is not None and line.high is not None:
        edge = [*_places(line.x, line.high, across, up), *_places(line.x[::-1], line.low[::-1], across, up)]
        if edge:
            path = "L".join(f"{a} {b}" for a, b in edge)
            band = fill('<path class="band {}" d="M{}Z"/>', line.style, path)
    points = "L".join(f"{a} {b}" for a, b in _places(line.x, line.y, across, up))
    return fill('{}<path class="line {}" d="M{}"/>', band, line.style, points) if points else band


def _places(x: Floats, y: Floats, across: _Scale, up: _Scale) -> list[tuple[float, float]]:
    known = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    return [(round(across.place(a), 1), round(UNITS - up.place(b), 1)) for a, b in known]


def _tick(value: float, scale: _Scale, side: str, text: Text) -> Markup:
    plain = re.sub(r"\.0+(?=\D|$)", "", text(value))  # 1 MB, not 1.00 MB
    return fill('<span style="{}:{:.2f}%">{}</span>', side, scale.place(value) / UNITS * 100, plain)


def _hover_data(lines: Sequence[Curve], across: _Scale, x: Axis, y: Axis) -> dict[str, object]:
    """Return what the script shows: at every place the lines' values there, with their bands."""
    series = []
    places = sorted({float(value) for line in lines for value in line.x})
    for line in lines:
        texts = [y.text(float(value)) for value in line.y]
        if line.low is not None and line.high is not None:
            ends = zip(texts, line.low.tolist(), line.high.tolist(), strict=True)
            texts = [f"{middle} ({y.text(low)} to {y.text(high)})" for middle, low, high in ends]
        known = dict(zip(line.x.tolist(), texts, strict=True))
        series.append({"name": line.name, "style": line.style, "text": [known.get(value, "") for value in places]})
    return {
        "steps": [round(across.place(value), 2) for value in places],
        "labels": [x.text(value) for value in places],
        "series": series,
        "span": [0, UNITS],
    }

"""Charts of the report: inline SVG that stretches with the page, labels in HTML so that they never shrink."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ringside.monitor.stats import Floats
from ringside.text import duration
from ringside.view.html.markup import NOTHING, Markup, embed_json, fill

POINTS = 400
UNITS = 1000
"""Both sides of a plot's own coordinates; the page stretches them."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a chart.

    Args:
        name: What it is called in the legend.
        values: One per step, NaN = missing.
        style: CSS class of the line: `s0` to `s7`, `culprit`, `crowd`.
        low, high: A band around the line, if it stands for several ranks.
    """

    name: str
    values: Floats
    style: str
    low: Floats | None = None
    high: Floats | None = None


class ChartMark(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of steps to shade, with a label: an episode. `until` is None while it is not over."""

    since: int
    until: int | None
    label: str


def chart(
    identity: str,
    title: str,
    steps: Sequence[int],
    series: Sequence[Series],
    *,
    marks: Sequence[ChartMark] = (),
    text: Callable[[float], str] = duration,
    from_zero: bool = True,
) -> Markup:
    """Return a `<figure>` with lines over training steps; readable without scripts, with numbers on hover.

    Args:
        identity: HTML id, unique in the page.
        title: The caption.
        steps: Training step of each value.
        series: The lines, the most important last (drawn on top).
        marks: Episodes to shade.
        text: How to write a value.
        from_zero: Whether the axis begins at 0, unless all values lie close together far above it.
    """
    values_at, series = _thin(np.asarray(steps, dtype=np.float64), series)
    low, high = _value_range([line.values for line in series], from_zero)
    first, last = (int(values_at[0]), int(values_at[-1])) if len(values_at) else (0, 0)
    x, y = _Scale(first, last), _Scale(low, high)

    # Episodes lie under the lines: a shaded stretch, and its label on the side where there is room for it.
    shapes, flags = [], []
    for mark in marks:
        until = last if mark.until is None else min(max(mark.until, first), last)
        begin, end = x.place(min(max(mark.since, first), last)), x.place(until)
        shapes.append(
            fill(
                '<rect class="episode" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>',
                begin,
                max(end - begin, 1),
                UNITS,
            )
        )
        side, edge = ("left", begin) if begin < 0.6 * UNITS else ("right", UNITS - begin)
        flags.append(
            fill(
                '<span class="flag {side}" style="{side}:{percent:.2f}%">{label}</span>',
                side=side,
                percent=100 * edge / UNITS,
                label=mark.label,
            )
        )
    shapes += [_line(line, values_at, x, y) for line in series]

    data = {
        "steps": [int(step) for step in values_at],
        "series": [
            {"name": line.name, "style": line.style, "text": [text(value) for value in line.values]} for line in series
        ],
        "span": [first, last],
    }
    medians = "; ".join(f"{line.name}: {text(_median(line.values))}" for line in series[-8:])
    levels = ticks(low, high)
    return fill(
        """<figure class="chart" id="{identity}">
<figcaption>{title}</figcaption>
<div class="legend">{legend}</div>
<div class="plot" tabindex="0" role="img" aria-label="{title}. Medians: {medians}.">
<div class="y">{levels}</div>
<div class="area"><svg viewBox="0 0 {units} {units}" preserveAspectRatio="none" aria-hidden="true">
{grid}{shapes}</svg>{flags}
<div class="cursor" hidden></div><div class="tip" hidden></div></div>
<div class="x"><span>step {first}</span><span>{last}</span></div>
</div><script type="application/json">{data}</script></figure>""",
        identity=identity,
        title=title,
        legend=[fill('<span class="key {}"><i></i>{}</span>', line.style, line.name) for line in series],
        medians=medians,
        levels=[
            fill('<span style="bottom:{:.2f}%">{}</span>', 100 * y.place(value) / UNITS, text(value))
            for value in levels
        ],
        units=UNITS,
        grid=[fill('<path class="grid" d="M0 {:.1f}H{}"/>', UNITS - y.place(value), UNITS) for value in levels],
        shapes=shapes,
        flags=flags,
        first=first,
        last=last,
        data=embed_json(data),
    )


def ticks(low: float, high: float) -> list[float]:
    """Return three to six round values between low and high."""
    if not high > low:
        return [low]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _thin(steps: Floats, series: Sequence[Series]) -> tuple[Floats, list[Series]]:
    """Reduce to at most `POINTS` points: the median of each bucket of steps."""
    size = math.ceil(len(steps) / POINTS)
    if size <= 1:
        return steps, list(series)

    def thin(values: Floats | None) -> Floats | None:
        if values is None:
            return None
        return np.array([_median(values[begin : begin + size]) for begin in range(0, len(values), size)])

    thinned = [
        msgspec.structs.replace(line, values=thin(line.values), low=thin(line.low), high=thin(line.high))
        for line in series
    ]
    return steps[::size], thinned


def _value_range(values: Sequence[Floats], from_zero: bool) -> tuple[float, float]:
    """The axis: up to the largest value, or a little above the ordinary ones where single values stand far out."""
    known = np.concatenate([line[np.isfinite(line)] for line in values]) if values else np.empty(0)
    if not known.size:
        return 0.0, 1.0
    # Single values far above the rest would press everything else flat: they are cut off.
    top = min(float(known.max()), 1.6 * float(np.quantile(known, 0.97)))
    bottom = float(np.quantile(known, 0.01))
    if from_zero and bottom < 0.6 * top:
        return 0.0, 1.2 * top or 1.0
    room = 0.25 * (top - bottom) or abs(top) * 0.1 or 1.0
    return bottom - room, top + room


class _Scale:
    """Values to places, 0 to `UNITS`."""

    def __init__(self, low: float, high: float) -> None:
        self._low, self._width = low, (high - low) or 1.0

    def place(self, value: float) -> float:
        return UNITS * (value - self._low) / self._width


def _line(line: Series, steps: Floats, x: _Scale, y: _Scale) -> Markup:
    band = NOTHING
    if line.low is not None and line.high is not None:
        edge = [*zip(steps, line.high, strict=True), *zip(steps[::-1], line.low[::-1], strict=True)]
        band = fill('<path class="band" d="{}Z"/>', _path(edge, x, y))
    points = list(zip(steps, line.values, strict=True))
    if len(points) == 1:  # a single step: a short dash instead of an invisible line
        points = [(points[0][0], points[0][1]), (points[0][0] + 1, points[0][1])]
    return fill('{}<path class="line {}" d="{}"/>', band, line.style, _path(points, x, y))


def _path(points: Sequence[tuple[float, float]], x: _Scale, y: _Scale) -> str:
    """Return SVG path data; the line is interrupted where a value is missing."""
    parts, pen = [], "M"
    for step, value in points:
        if not math.isfinite(value):
            pen = "M"
            continue
        height = min(max(UNITS - y.place(value), 0.0), float(UNITS))
        parts.append(f"{pen}{x.place(step):.1f} {height:.1f}")
        pen = "L"
    return "".join(parts)


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan

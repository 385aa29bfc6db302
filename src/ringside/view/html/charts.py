"""Charts of the report: inline SVG that stretches with the page, labels in HTML so that they never shrink."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ringside.monitor.stats import Floats
from ringside.text import duration

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
) -> str:
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
    at, series = _thin(np.asarray(steps, dtype=np.float64), series)
    low, high = _span([line.values for line in series], from_zero)
    first, last = (int(at[0]), int(at[-1])) if len(at) else (0, 0)
    across = _scale(first, last)
    up = _scale(low, high)
    shapes = "".join(_shading(mark, first, last, across) for mark in marks)
    shapes += "".join(_line(line, at, across, up) for line in series)
    data = {
        "steps": [int(step) for step in at],
        "series": [
            {"name": line.name, "style": line.style, "text": [text(value) for value in line.values]} for line in series
        ],
        "span": [first, last],
    }
    spoken = "; ".join(f"{line.name}: {text(_median(line.values))}" for line in series[-8:])
    return f"""<figure class="chart" id="{identity}">
<figcaption>{html.escape(title)}</figcaption>
<div class="legend">{"".join(_key(line) for line in series)}</div>
<div class="plot" tabindex="0" role="img" aria-label="{html.escape(f"{title}. Medians: {spoken}.")}">
<div class="y">{"".join(_tick(value, up, text) for value in ticks(low, high))}</div>
<div class="area"><svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" aria-hidden="true">
{_grid(ticks(low, high), up)}{shapes}</svg>{"".join(_flag(mark, first, last, across) for mark in marks)}
<div class="cursor" hidden></div><div class="tip" hidden></div></div>
<div class="x"><span>step {first}</span><span>{last}</span></div>
</div><script type="application/json">{embedded(data)}</script></figure>"""


def embedded(data: object) -> str:
    """Return JSON that is safe inside a `<script>` element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


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


def _span(values: Sequence[Floats], from_zero: bool) -> tuple[float, float]:
    """The axis: up to the largest value, or a little above the usual ones where single values stand far out."""
    known = np.concatenate([line[np.isfinite(line)] for line in values]) if values else np.empty(0)
    if not known.size:
        return 0.0, 1.0
    top = min(float(known.max()), 1.6 * float(np.quantile(known, 0.97)))
    bottom = float(np.quantile(known, 0.01))
    if from_zero and bottom < 0.6 * top:
        return 0.0, 1.2 * top or 1.0
    room = 0.25 * (top - bottom) or abs(top) * 0.1 or 1.0
    return bottom - room, top + room


def _scale(low: float, high: float) -> Callable[[float], float]:
    width = (high - low) or 1.0
    return lambda value: UNITS * (value - low) / width


def _line(line: Series, steps: Floats, across: Callable[[float], float], up: Callable[[float], float]) -> str:
    band = ""
    if line.low is not None and line.high is not None:
        edge = [*zip(steps, line.high, strict=True), *zip(steps[::-1], line.low[::-1], strict=True)]
        band = f'<path class="band" d="{_path(edge, across, up)}Z"/>'
    points = list(zip(steps, line.values, strict=True))
    if len(points) == 1:  # a single step: a short dash instead of an invisible line
        points = [(points[0][0], points[0][1]), (points[0][0] + 1, points[0][1])]
    return f'{band}<path class="line {line.style}" d="{_path(points, across, up)}"/>'


def _path(points: Sequence[tuple[float, float]], across: Callable[[float], float], up: Callable[[float], float]) -> str:
    parts, pen = [], "M"
    for step, value in points:
        if not math.isfinite(value):
            pen = "M"
            continue
        y = min(max(UNITS - up(value), 0.0), float(UNITS))
        parts.append(f"{pen}{across(step):.1f} {y:.1f}")
        pen = "L"
    return "".join(parts)


def _grid(values: Sequence[float], up: Callable[[float], float]) -> str:
    return "".join(f'<path class="grid" d="M0 {UNITS - up(value):.1f}H{UNITS}"/>' for value in values)


def _shading(mark: ChartMark, first: int, last: int, across: Callable[[float], float]) -> str:
    begin, end = _reach(mark, first, last, across)
    return f'<rect class="episode" x="{begin:.1f}" y="0" width="{max(end - begin, 1):.1f}" height="{UNITS}"/>'


def _flag(mark: ChartMark, first: int, last: int, across: Callable[[float], float]) -> str:
    begin, _ = _reach(mark, first, last, across)
    side = "left" if begin < 0.6 * UNITS else "right"
    at = begin / 10 if side == "left" else 100 - begin / 10
    return f'<span class="flag {side}" style="{side}:{at:.2f}%">{html.escape(mark.label)}</span>'


def _reach(mark: ChartMark, first: int, last: int, across: Callable[[float], float]) -> tuple[float, float]:
    until = last if mark.until is None else min(max(mark.until, first), last)
    return across(min(max(mark.since, first), last)), across(until)


def _tick(value: float, up: Callable[[float], float], text: Callable[[float], str]) -> str:
    return f'<span style="bottom:{up(value) / 10:.2f}%">{html.escape(text(value))}</span>'


def _key(line: Series) -> str:
    return f'<span class="key {line.style}"><i></i>{html.escape(line.name)}</span>'


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else math.nan

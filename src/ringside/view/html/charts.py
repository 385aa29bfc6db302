"""Charts: lines over training steps, and over sizes, hosts or buckets.

The plot is inline SVG that stretches with the page; its labels are HTML, so that they never shrink. A chart is readable
without scripts; `report.js` shows numbers on hover and zooms charts over steps, by `brush.js`, which the live page has
as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ringside.monitor.stats import Floats, known_median
from ringside.text import duration
from ringside.view.html.markup import NOTHING, Markup, embed_json, fill
from ringside.view.html.page import note_line

Text = Callable[[float], str]

UNITS = 1000
"""The height of a plot's own coordinates, and the width of one that is not over steps; the page stretches them."""

POINTS = 360
MOST_TICKS = 5
STEP_TICKS = 6
ROOM = 0.04  # above and below, as a share of what is shown


@dataclass(frozen=True, eq=False)
class Curve:
    """One line, or the dots of what was measured.

    Args:
        name: In the legend.
        x: Where, ascending.
        y: What, NaN where nothing is known.
        style: CSS class of its colour: `s0` to `s7`, `culprit`, `crowd`.
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


@dataclass(frozen=True)
class ChartMark:
    """A stretch of steps to shade, with a label: an episode. `until` is None while it is not over."""

    since: int
    until: int | None
    label: str


def chart(
    identity: str,
    title: str,
    lines: Sequence[Curve],
    *,
    marks: Sequence[ChartMark] = (),
    text: Text = duration,
    from_zero: bool = True,
) -> Markup:
    """Return a `<figure>` with lines over training steps.

    Args:
        identity: HTML id, unique in the page.
        title: The caption.
        lines: All over the same steps; the most important last (drawn on top).
        marks: Episodes to shade.
        text: How to write a value.
        from_zero: Whether the axis begins at 0, unless all values lie close together far above it.
    """
    each, note = math.ceil(len(lines[0].x) / POINTS), ""
    if each > 1:
        lines, note = [_thin(line, each) for line in lines], f"Each point is the median of {each} steps."
    steps = [int(step) for step in lines[0].x]
    first, last = (steps[0], steps[-1]) if steps else (0, 0)
    low, high = _value_range([line.y for line in lines], from_zero)
    # Across, one unit is one step: short numbers, and exact however far one zooms in.
    across = last - first or 1
    x, y = _Scale(first, last, units=across), _Scale(low, high)

    # Episodes lie under the lines: a shaded stretch, and its label on the side where there is room for it.
    shapes, flags = [], []
    for mark in marks:
        until = last if mark.until is None else min(max(mark.until, first), last)
        begin, end = x.place(min(max(mark.since, first), last)), x.place(until)
        template = '<rect class="episode" x="{:.10g}" y="0" width="{:.10g}" height="{}"/>'
        shapes.append(fill(template, begin, max(end - begin, across / UNITS), UNITS))
        side, edge = ("left", begin) if begin < 0.6 * across else ("right", across - begin)
        template = '<span class="flag {side}" style="{side}:{percent:.2f}%">{label}</span>'
        flags.append(fill(template, side=side, percent=100 * edge / across, label=mark.label))
    medians = "; ".join(f"{line.name}: {text(known_median(line.y, math.nan))}" for line in lines[-8:])
    # Only whole numbers are steps.
    places = [(x.place(step), f"{step:.0f}") for step in ticks(first, last, STEP_TICKS) if step % 1 == 0]
    return _figure(
        identity,
        title,
        note,
        f"Medians: {medians}",
        lines,
        [[text(value) for value in line.y] for line in lines],
        [(y.place(value), _short(text(value))) for value in ticks(low, high)],
        places,
        [*shapes, *(_draw_line(line, x, y, "band") for line in lines)],
        {"steps": steps, "span": [first, last], "marks": [[mark.since, mark.until] for mark in marks]},
        flags,
        across=across,
        kind="chart",
    )


def curves(identity: str, title: str, lines: Sequence[Curve], x: Axis, y: Axis, note: str = "") -> Markup:
    """Return a `<figure>` with lines over sizes, hosts or buckets.

    Args:
        identity: HTML id, unique in the page.
        title: The caption.
        lines: The most important last: it is drawn on top.
        x: The horizontal axis; of a logarithmic one all values are more than 0.
        y: The vertical one.
        note: Below the caption.
    """
    across, places = _axis_scale(np.concatenate([line.x for line in lines]), x, 0.0)
    # Bands are shown whole, so their ends count for the height as the lines do.
    heights = [end for line in lines for end in (line.y, line.low, line.high) if end is not None]
    up, levels = _axis_scale(np.concatenate(heights), y, ROOM)
    spoken = "; ".join(
        f"{line.name}: {y.text(float(line.y[-1]))} at {x.text(float(line.x[-1]))}" for line in lines[-6:]
    )
    # What the script shows: at every place the lines' values there, with their bands.
    shown = []
    values = sorted({float(value) for line in lines for value in line.x})
    for line in lines:
        texts = [y.text(float(value)) for value in line.y]
        if line.low is not None and line.high is not None:
            ends = zip(texts, line.low.tolist(), line.high.tolist(), strict=True)
            texts = [f"{middle} ({y.text(low)} to {y.text(high)})" for middle, low, high in ends]
        known = dict(zip(line.x.tolist(), texts, strict=True))
        shown.append([known.get(value, "") for value in values])
    stops = {"steps": [round(across.place(value), 2) for value in values], "labels": list(map(x.text, values))}
    shapes = [_draw_line(line, across, up, f"band {line.style}") for line in lines]
    return _figure(identity, title, note, spoken, lines, shown, levels, places, shapes, {**stops, "span": [0, UNITS]})


def _figure(
    identity: str,
    title: str,
    note: str,
    spoken: str,
    lines: Sequence[Curve],
    texts: Sequence[Sequence[str]],
    levels: Sequence[tuple[float, str]],
    places: Sequence[tuple[float, str]],
    shapes: Iterable[Markup],
    data: Mapping[str, object],
    flags: Iterable[Markup] = (),
    *,
    across: float = UNITS,
    kind: str = "chart curves",
) -> Markup:
    """Return the figure of a chart: its caption, a legend, and the plot between its labels.

    Args:
        identity: HTML id.
        title: The caption.
        note: What stands below it.
        spoken: The plot in words.
        lines: What the legend names.
        texts: Of every line its values, as `report.js` shows them on hover.
        levels: Place and text of the labels at the left.
        places: Place and text of the labels below.
        shapes: What is drawn.
        data: Where those values are, and where the marks lie of a chart that `report.js` zooms.
        flags: Labels over what is drawn.
        across: The width of the plot's own coordinates.
        kind: CSS classes.
    """
    series = [{"name": one.name, "style": one.style, "text": text} for one, text in zip(lines, texts, strict=True)]
    axis = '<div class="xs">{}</div>' if "curves" in kind else '<div class="name">step</div><div class="x">{}</div>'
    return fill(
        """<figure class="{kind}" id="{identity}"><figcaption>{title}</figcaption>{note}
<div class="legend">{legend}</div>
<div class="plot" tabindex="0" role="img" aria-label="{title}. {spoken}.">
<div class="y">{levels}</div>
<div class="area"><svg viewBox="0 0 {across} {units}" preserveAspectRatio="none" aria-hidden="true">
{grid}{shapes}</svg>{flags}
<div class="cursor" hidden></div><div class="tip" hidden></div></div>
{below}
</div><script type="application/json">{data}</script></figure>""",
        kind=kind,
        identity=identity,
        title=title,
        note=note_line(note),
        spoken=spoken,
        legend=[
            fill('<span class="key {}{}"><i></i>{}</span>', line.style, " dotted" if line.dots else "", line.name)
            for line in lines
        ],
        levels=[_tick("bottom", place / UNITS, text) for place, text in levels],
        across=across,
        units=UNITS,
        grid=[fill('<path class="grid" d="M0 {:.1f}H{}"/>', UNITS - place, across) for place, _ in levels],
        shapes=shapes,
        flags=flags,
        below=fill(axis, [_tick("left", place / across, text) for place, text in places]),
        data=embed_json({**data, "series": series}),
    )


def ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return three to six round values between low and high, or about as many more as are asked for."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return [index * step for index in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _thin(line: Curve, each: int) -> Curve:
    """Reduce to one point for each bucket of so many: the median."""

    def thin(values: Floats) -> Floats:
        return np.array([known_median(values[begin : begin + each], math.nan) for begin in range(0, len(values), each)])

    low, high = (None if end is None else thin(end) for end in (line.low, line.high))
    return replace(line, x=line.x[::each], y=thin(line.y), low=low, high=high)


def _value_range(values: Sequence[Floats], from_zero: bool) -> tuple[float, float]:
    """The axis: up to the largest value, or a little above the ordinary ones where single values stand far out."""
    known = np.concatenate([line[np.isfinite(line)] for line in values])
    if not known.size:
        return 0.0, 1.0
    # Single values far above the rest would press everything else flat: they are cut off.
    top = min(float(known.max()), 1.6 * float(np.quantile(known, 0.97)))
    bottom = float(np.quantile(known, 0.01))
    if from_zero and bottom <= 0.6 * top:  # where all is 0, too
        return 0.0, 1.2 * top or 1.0
    room = 0.25 * (top - bottom) or abs(top) * 0.1 or 1.0
    return bottom - room, top + room


_Point = tuple[float, int]
"""A place in a plot's own coordinates."""


class _Scale:
    """Values, or their logarithms, to places from 0 to so many units."""

    def __init__(self, low: float, high: float, *, log: bool = False, units: float = UNITS) -> None:
        self._low, self._width, self._log, self._units = low, (high - low) or 1.0, log, units

    def place(self, value: float) -> float:
        return self._units * ((math.log10(value) if self._log else value) - self._low) / self._width


def _axis_scale(values: Floats, axis: Axis, room: float) -> tuple[_Scale, list[tuple[float, str]]]:
    """Return an axis's scale, and place and text of its labels."""
    known = values[np.isfinite(values) & ((values > 0) | (not axis.log))]
    if axis.low is not None:
        known = np.append(known, axis.low)
    shown = np.log10(known) if axis.log else known
    low, high = (float(shown.min()), float(shown.max())) if shown.size else (0.0, 1.0)
    more = room * ((high - low) or 1.0)
    low, high = low - more, high + more
    scale = _Scale(low, high, log=axis.log)
    labelled = list(axis.marks) or (_decades if axis.log else ticks)(low, high)
    return scale, [(scale.place(value), _short(axis.text(value))) for value in labelled]


def _decades(low: float, high: float) -> list[float]:
    """Return powers of ten between two logarithms, every second, third ... of many, parts of them too of few."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    # Within two decades 1, 2 and 5 of each are labelled, or 1 and 3 where these are too many to stand side by side.
    if last - first < 2:
        for factors in ((1, 2, 5), (1, 3)):
            steps = [f * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for f in factors]
            inside = [v for v in steps if low - 1e-9 <= math.log10(v) <= high + 1e-9]
            if len(inside) <= MOST_TICKS:
                break
        return inside
    step = math.ceil((last - first + 1) / MOST_TICKS)
    return [10.0**power for power in range(first, last + 1, step)]


def _short(text: str) -> str:
    """A label of an axis: 1 MB, not 1.00 MB."""
    return re.sub(r"\.0+(?=\D|$)", "", text)


def _tick(side: str, share: float, text: str) -> Markup:
    end = Markup(' class="end"' if side == "left" and share > 0.97 else "")  # it ends where the plot ends
    return fill('<span{} style="{}:{:.2f}%">{}</span>', end, side, 100 * share, text)


def _draw_line(line: Curve, x: _Scale, y: _Scale, band: str) -> Markup:
    """Return a line, interrupted where a value is missing, over its band, which has these CSS classes; or dots."""

    def places(xs: Floats, ys: Floats) -> list[_Point | None]:
        heights = [min(max(UNITS - y.place(value), 0.0), UNITS) if math.isfinite(value) else None for value in ys]
        pairs = zip(xs, heights, strict=True)
        return [None if high is None else (round(x.place(at), 1), round(high)) for at, high in pairs]

    # From point to point, so that files stay small: differences of rounded places add up to rounded places.
    def path(points: Sequence[_Point | None]) -> str:
        return "".join(
            f"M{point[0]:.10g} {point[1]}"
            if before is None
            else f"l{point[0] - before[0]:.10g}{point[1] - before[1]:+d}"
            for before, point in pairwise([None, *points])
            if point is not None
        )

    points = places(line.x, line.y)
    if line.dots:
        dots = [f"M{point[0]:.10g} {point[1]}h0" for point in points if point is not None]
        return fill('<path class="dots {}" d="{}"/>', line.style, "".join(dots))
    if len(points) == 1:  # a short dash instead of an invisible line
        points += places(line.x + 1, line.y)
    shade = NOTHING
    if line.low is not None and line.high is not None:
        edge = places(line.x, line.high) + places(line.x[::-1], line.low[::-1])
        shade = fill('<path class="{}" d="{}Z"/>', band, path(edge))
    return fill('{}<path class="line {}" d="{}"/>', shade, line.style, path(points))

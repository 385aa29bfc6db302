"""Curves over a logarithmic axis: sizes, hosts, buckets. Lines with bands, and dots for what was measured.

Like the report's charts the plot stretches with the page and its labels are HTML; `report.js` shows numbers on hover.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.view.html.charts import UNITS, embedded, ticks

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


def curves(identity: str, title: str, lines: Sequence[Curve], x: Axis, y: Axis, note: str = "") -> str:
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
    up = _Scale(np.concatenate([_shown(line) for line in lines]), y, ROOM)
    shapes = "".join(f'<path class="grid" d="M0 {UNITS - up.at(v):.1f}H{UNITS}"/>' for v in up.ticks)
    shapes += "".join(_shape(line, across, up) for line in lines)
    said = f'<p class="note">{html.escape(note)}</p>' if note else ""
    spoken = "; ".join(
        f"{line.name}: {y.text(float(line.y[-1]))} at {x.text(float(line.x[-1]))}" for line in lines[-6:]
    )
    return f"""<figure class="chart curves" id="{identity}"><figcaption>{html.escape(title)}</figcaption>{said}
<div class="legend">{"".join(_key(line) for line in lines)}</div>
<div class="plot" tabindex="0" role="img" aria-label="{html.escape(f"{title}. {spoken}.")}">
<div class="y">{"".join(_tick(v, up, "bottom", y.text) for v in up.ticks)}</div>
<div class="area"><svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" aria-hidden="true">{shapes}</svg>
<div class="cursor" hidden></div><div class="tip" hidden></div></div>
<div class="xs">{"".join(_tick(v, across, "left", x.text) for v in across.ticks)}</div>
</div><script type="application/json">{embedded(_data(lines, across, x, y))}</script></figure>"""


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
        plain = _decades(self.low, self.high) if axis.log else ticks(self.low, self.high)
        self.ticks = list(axis.marks) or plain

    def at(self, value: float) -> float:
        shown = math.log10(value) if self._log else value
        return UNITS * (shown - self.low) / ((self.high - self.low) or 1.0)


def _decades(low: float, high: float) -> list[float]:
    """Return powers of ten between two logarithms, every second, third ... of many, halves too of few."""
    first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
    if last - first < 2:
        steps = [f * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for f in (1, 2, 5)]
        return [v for v in steps if low - 1e-9 <= math.log10(v) <= high + 1e-9]
    step = math.ceil((last - first + 1) / MOST_TICKS)
    return [10.0**power for power in range(first, last + 1, step)]


def _shown(line: Curve) -> Floats:
    parts = [line.y, *(end for end in (line.low, line.high) if end is not None)]
    return np.concatenate(parts)


def _shape(line: Curve, across: _Scale, up: _Scale) -> str:
    if line.dots:
        places = "".join(f"M{a} {b}h0" for a, b in _places(line.x, line.y, across, up))
        return f'<path class="dots {line.style}" d="{places}"/>'
    band = ""
    if line.low is not None and line.high is not None:
        edge = [*_places(line.x, line.high, across, up), *_places(line.x[::-1], line.low[::-1], across, up)]
        band = f'<path class="band {line.style}" d="M{"L".join(f"{a} {b}" for a, b in edge)}Z"/>' if edge else ""
    points = "L".join(f"{a} {b}" for a, b in _places(line.x, line.y, across, up))
    return f'{band}<path class="line {line.style}" d="M{points}"/>' if points else band


def _places(x: Floats, y: Floats, across: _Scale, up: _Scale) -> list[tuple[float, float]]:
    known = [(float(a), float(b)) for a, b in zip(x, y, strict=True) if math.isfinite(b)]
    return [(round(across.at(a), 1), round(UNITS - up.at(b), 1)) for a, b in known]


def _tick(value: float, scale: _Scale, side: str, text: Text) -> str:
    plain = re.sub(r"\.0+(?=\D|$)", "", text(value))  # 1 MB, not 1.00 MB
    return f'<span style="{side}:{scale.at(value) / UNITS * 100:.2f}%">{html.escape(plain)}</span>'


def _key(line: Curve) -> str:
    dots = " dotted" if line.dots else ""
    return f'<span class="key {line.style}{dots}"><i></i>{html.escape(line.name)}</span>'


def _data(lines: Sequence[Curve], across: _Scale, x: Axis, y: Axis) -> dict[str, object]:
    """Return what the script shows: at every place the lines' values there."""
    places = sorted({float(value) for line in lines for value in line.x})
    known = [dict(zip(line.x.tolist(), _texts(line, y.text), strict=True)) for line in lines]
    return {
        "steps": [round(across.at(value), 2) for value in places],
        "labels": [x.text(value) for value in places],
        "series": [
            {"name": line.name, "style": line.style, "text": [texts.get(value, "") for value in places]}
            for line, texts in zip(lines, known, strict=True)
        ],
        "span": [0, UNITS],
    }


def _texts(line: Curve, text: Text) -> list[str]:
    if line.low is None or line.high is None:
        return [text(float(value)) for value in line.y]
    ends = zip(line.y.tolist(), line.low.tolist(), line.high.tolist(), strict=True)
    return [f"{text(middle)} ({text(low)} to {text(high)})" for middle, low, high in ends]

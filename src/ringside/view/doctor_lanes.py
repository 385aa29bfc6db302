"""Lanes: what every rank did over time, waits marked."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ringside.doctor.findings import Lane, Span
from ringside.text import duration

UNITS = 10_000.0
"""Width of a lane in its own coordinates; the page stretches it."""
KINDS = {
    "compute": "compute",
    "communication": "communication",
    "hidden": "communication behind compute",
    "wait": "waiting for others",
    "idle": "idle",
    "missing": "culprit: not there, or stopped",
}
TICKS = 5


def lanes_figure(lanes: Sequence[Lane]) -> str:
    """Return a `<figure>` with one lane per rank; all share their origin and scale."""
    end = max((span.end_s for lane in lanes for span in lane.spans), default=0.0)
    if end <= 0:
        return ""
    present = {span.kind for lane in lanes for span in lane.spans}
    legend = "".join(
        f'<span class="key"><i class="{kind}"></i>{words}</span>' for kind, words in KINDS.items() if kind in present
    )
    rows = "".join(_lane(lane, end) for lane in lanes)
    ticks = "".join(f"<span>{duration(end * tick / TICKS)}</span>" for tick in range(TICKS + 1))
    return f"""<figure class="lanes"><figcaption>{html.escape(lanes[0].title)}</figcaption>
<p class="legend">{legend}</p><div class="rows">{rows}</div><div class="ticks">{ticks}</div></figure>"""


def _lane(lane: Lane, end: float) -> str:
    culprit = lane.note == "culprit"
    bars = "".join(_bar(span, end) for span in lane.spans)
    waits = sum(span.end_s - span.start_s for span in lane.spans if span.kind == "wait")
    said = f"rank {lane.rank}: waited {duration(waits)}" + (", culprit" if culprit else "")
    badge = '<em class="badge">verdict</em>' if culprit else ""
    return f"""<div class="lane{" culprit" if culprit else ""}"><b>{lane.rank}{badge}</b>
<svg viewBox="0 0 {UNITS:.0f} 10" preserveAspectRatio="none" role="img"
 aria-label="{html.escape(said)}">{bars}</svg></div>"""


def _bar(span: Span, end: float) -> str:
    x = UNITS * max(span.start_s, 0.0) / end
    width = max(UNITS * (span.end_s - span.start_s) / end, 8.0)
    name = html.escape(f"{span.name or KINDS.get(span.kind, span.kind)}, {duration(span.end_s - span.start_s)}")
    kind = span.kind if span.kind in KINDS else "idle"
    return f'<rect class="{kind}" x="{x:.0f}" y="0" width="{width:.0f}" height="10"><title>{name}</title></rect>'

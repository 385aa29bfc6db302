"""A simulated schedule over time: a lane per rank, what it sends above what it takes, and the critical path through."""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.predict.simulation.timeline import Timeline
from ringside.text import duration

Floats = NDArray[np.float64]
Spans = dict[tuple[str, int], Floats]

MOST_LANES = 16
MOST_MESSAGES = 400_000
UNITS = 10_000.0
LANE = 20.0  # height of a lane in the drawing's own coordinates
LEAST = UNITS / 1500  # what is closer together than this is drawn as one piece
TICKS = 4
LEGEND = (
    ("lateness", "own work, longer than the shortest rank's"),
    ("sending", "sending"),
    ("taking", "being sent to, latency included"),
    ("critical", "critical path"),
)


def gantt(timeline: Timeline, title: str, end_s: float | None = None, note: str = "") -> str:
    """Return a `<figure>` with a lane per rank; of many ranks those on the critical path first.

    Args:
        timeline: What was simulated.
        title: The caption.
        end_s: Where its time axis ends, to compare with another; None: where it ends itself.
        note: Below the caption.
    """
    end = max(end_s or 0.0, timeline.seconds) or 1e-12
    lanes = shown_lanes(timeline)
    rows = {vertex: row for row, vertex in enumerate(lanes)}
    culprits = set(timeline.guilty.ranks) if timeline.guilty.kind in ("late rank", "slow link") else set()
    grounds = (
        f'<rect class="lane" x="0" y="{LANE * row + 1}" width="{UNITS:.0f}" height="18"/>' for row in rows.values()
    )
    shapes = [*grounds, *_late(timeline, rows, end), *_busy(timeline, rows, end)]
    shapes += [f'<path class="end" d="M{UNITS * timeline.seconds / end:.1f} 0V{LANE * len(rows):.0f}"/>']
    shapes += [f'<path class="path" d="{_path(timeline, rows, end)}"/>']
    some = timeline.schedule.vertices > MOST_LANES
    said = f"{len(lanes)} of {timeline.schedule.ranks} ranks: those of the critical path first" if some else ""
    names = "".join(_name(timeline, vertex, vertex in culprits) for vertex in lanes)
    present = [(kind, text) for kind, text in LEGEND if kind != "lateness" or any(timeline.late.values())]
    legend = "".join(f'<span class="key {kind}"><i></i>{text}</span>' for kind, text in present)
    notes = "".join(f'<p class="note">{html.escape(text)}</p>' for text in (note, said) if text)
    ticks = "".join(f"<span>{duration(end * tick / TICKS)}</span>" for tick in range(TICKS + 1))
    height = f"{1.45 * len(lanes):.2f}rem"
    return f"""<figure class="gantt" data-end="{end!r}"><figcaption>{html.escape(title)}</figcaption>{notes}
<div class="legend">{legend}</div><div class="box"><div class="names">{names}</div>
<div class="lanes" style="height:{height}"><svg viewBox="0 0 {UNITS:.0f} {LANE * len(lanes):.0f}"
 preserveAspectRatio="none" role="img" aria-label="{html.escape(f"{title}: {timeline.guilty}")}">{"".join(shapes)}</svg>
<div class="cursor" hidden></div></div></div><div class="ticks">{ticks}</div></figure>"""


def shown_lanes(timeline: Timeline) -> list[int]:
    """Return the vertices that get a lane: all of few; of many those that the critical path is longest on."""
    count = timeline.schedule.vertices
    if count <= MOST_LANES:
        return list(range(count))
    on_path: Counter[int] = Counter()
    for hop in timeline.critical_path:
        for vertex in {hop.src, hop.dst}:
            on_path[vertex] += max(int(1e9 * (hop.end_s - hop.begin_s)), 1)
    guilty = [rank for rank in timeline.guilty.ranks if timeline.guilty.kind != "narrow host"]
    order = [*guilty, *(vertex for vertex, _ in on_path.most_common()), *range(count)]
    return sorted(list(dict.fromkeys(order))[:MOST_LANES])


def spans(timeline: Timeline, vertices: Sequence[int]) -> Spans:
    """Return when vertices send and are sent to.

    Returns:
        By (`sends` or `takes`, vertex), float64 [n, 2] of seconds, ascending; nothing where the timeline holds more
        than `MOST_MESSAGES` messages.
    """
    if timeline.schedule.rounds * timeline.schedule.vertices > MOST_MESSAGES:
        return {}
    found: defaultdict[tuple[str, int], list[NDArray[np.float64]]] = defaultdict(list)
    for sent in timeline.sent():
        for kind, ends, until in (("sends", sent.src, sent.leave_s), ("takes", sent.dst, sent.arrive_s)):
            for vertex in vertices:
                here = ends == vertex
                if here.any():
                    found[kind, vertex].append(np.stack([sent.begin_s[here], until[here]], axis=1))
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _busy(timeline: Timeline, rows: dict[int, int], end: float) -> Iterator[str]:
    for (kind, vertex), pieces in spans(timeline, list(rows)).items():
        y = LANE * rows[vertex] + (2.5 if kind == "sends" else 10.5)
        for begin, until in _merged(UNITS * pieces / end):
            yield f'<rect class="{kind}" x="{begin:.1f}" y="{y}" width="{max(until - begin, 3):.1f}" height="7"/>'


def _merged(pieces: Floats) -> list[tuple[float, float]]:
    """Return spans in order, those that touch or nearly do as one."""
    merged: list[tuple[float, float]] = []
    for begin, until in pieces[np.argsort(pieces[:, 0])].tolist():
        if merged and begin - merged[-1][1] <= LEAST:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((begin, until))
    return merged


def _late(timeline: Timeline, rows: dict[int, int], end: float) -> Iterator[str]:
    for rank, seconds in timeline.late.items():
        if rank in rows and seconds > 0:
            text = f"rank {rank} works {duration(seconds)} longer"
            place = f'x="0" y="{LANE * rows[rank] + 2.5}" width="{UNITS * seconds / end:.1f}" height="15"'
            yield f'<rect class="late" {place}><title>{html.escape(text)}</title></rect>'


def _path(timeline: Timeline, rows: dict[int, int], end: float) -> str:
    """Return the critical path's way through the lanes; hops between ranks without a lane are left out."""
    points: list[tuple[float, float]] = []
    for hop in timeline.critical_path:
        for vertex, at in ((hop.src, hop.begin_s), (hop.dst, hop.end_s)):
            if vertex in rows:
                points.append((round(UNITS * at / end, 1), LANE * rows[vertex] + LANE / 2))
    thin = [point for i, point in enumerate(points) if not i or point != points[i - 1]]
    return "M" + "L".join(f"{x} {y}" for x, y in thin) if thin else ""


def _name(timeline: Timeline, vertex: int, culprit: bool) -> str:
    name = f"rank {vertex}" if vertex < timeline.schedule.ranks else "switch"
    return f"<span{' class=culprit' if culprit else ''}>{name}</span>"

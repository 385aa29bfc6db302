"""A simulated schedule over time: a lane per rank, what it sends above what it takes, and the critical path through."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.predict.simulation.timeline import Timeline
from ringside.text import duration
from ringside.view.html.markup import Markup, fill
from ringside.view.html.page import note_line

Floats = NDArray[np.float64]
Spans = dict[tuple[str, int], Floats]

MOST_LANES = 16
MOST_MESSAGES = 400_000
UNITS = 10_000.0
LANE = 20.0  # height of a lane in the drawing's own coordinates
LEAST = UNITS / 1500  # what is closer together than this is drawn as one piece
TICKS = 4
LEGEND = (
    ("lateness", Markup("own work, longer than the shortest rank's")),
    ("sending", "sending"),
    ("taking", "being sent to, latency included"),
    ("critical", "critical path"),
)


def gantt(timeline: Timeline, title: str, end_s: float | None = None, note: str = "") -> Markup:
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

    # From the ground up: the lanes, who was late, what was sent and taken, the end, and the critical path over it all.
    shapes = [
        fill('<rect class="lane" x="0" y="{}" width="{:.0f}" height="18"/>', LANE * row + 1, UNITS)
        for row in rows.values()
    ]
    for rank, seconds in timeline.late.items():
        if rank in rows and seconds > 0:
            shapes.append(
                fill(
                    '<rect class="late" x="0" y="{y}" width="{width:.1f}" height="15"><title>{label}</title></rect>',
                    y=LANE * rows[rank] + 2.5,
                    width=UNITS * seconds / end,
                    label=f"rank {rank} works {duration(seconds)} longer",
                )
            )
    for (kind, vertex), pieces in message_spans(timeline, lanes).items():
        y = LANE * rows[vertex] + (2.5 if kind == "sends" else 10.5)
        for begin, until in _merge_spans(UNITS * pieces / end):
            template = '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="7"/>'
            shapes.append(fill(template, kind, begin, y, max(until - begin, 3)))
    shapes.append(fill('<path class="end" d="M{:.1f} 0V{:.0f}"/>', UNITS * timeline.seconds / end, LANE * len(rows)))
    # The critical path goes from lane to lane; hops between ranks without a lane are left out.
    points: list[tuple[float, float]] = []
    for hop in timeline.critical_path:
        for vertex, seconds in ((hop.src, hop.begin_s), (hop.dst, hop.end_s)):
            if vertex in rows:
                points.append((round(UNITS * seconds / end, 1), LANE * rows[vertex] + LANE / 2))
    thin = [point for i, point in enumerate(points) if not i or point != points[i - 1]]
    path = "M" + "L".join(f"{x} {y}" for x, y in thin) if thin else ""
    shapes.append(fill('<path class="path" d="{}"/>', path))

    names = []
    for vertex in lanes:
        culprit = Markup(" class=culprit" if vertex in culprits else "")
        names.append(
            fill("<span{}>{}</span>", culprit, f"rank {vertex}" if vertex < timeline.schedule.ranks else "switch")
        )
    left_out = ""
    if timeline.schedule.vertices > MOST_LANES:
        left_out = f"{len(lanes)} of {timeline.schedule.ranks} ranks: those of the critical path first"
    return fill(
        """<figure class="gantt" data-end="{end!r}"><figcaption>{title}</figcaption>{notes}
<div class="legend">{legend}</div><div class="box"><div class="names">{names}</div>
<div class="lanes" style="height:{height:.2f}rem"><svg viewBox="0 0 {width:.0f} {depth:.0f}"
 preserveAspectRatio="none" role="img" aria-label="{title}: {guilty}">{shapes}</svg>
<div class="cursor" hidden></div></div></div><div class="ticks">{ticks}</div></figure>""",
        end=end,
        title=title,
        notes=[note_line(note), note_line(left_out)],
        legend=[
            fill('<span class="key {}"><i></i>{}</span>', kind, text)
            for kind, text in LEGEND
            if kind != "lateness" or any(timeline.late.values())
        ],
        names=names,
        height=1.45 * len(lanes),
        width=UNITS,
        depth=LANE * len(lanes),
        guilty=str(timeline.guilty),
        shapes=shapes,
        ticks=[fill("<span>{}</span>", duration(end * tick / TICKS)) for tick in range(TICKS + 1)],
    )


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


def message_spans(timeline: Timeline, vertices: Sequence[int]) -> Spans:
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
                of_vertex = ends == vertex
                if of_vertex.any():
                    found[kind, vertex].append(np.stack([sent.begin_s[of_vertex], until[of_vertex]], axis=1))
    return {key: np.concatenate(parts) for key, parts in found.items()}


def _merge_spans(pieces: Floats) -> list[tuple[float, float]]:
    """Return spans in order, those that touch or nearly do as one."""
    merged: list[tuple[float, float]] = []
    for begin, until in pieces[np.argsort(pieces[:, 0])].tolist():
        if merged and begin - merged[-1][1] <= LEAST:
            merged[-1] = (merged[-1][0], max(merged[-1][1], until))
        else:
            merged.append((begin, until))
    return merged

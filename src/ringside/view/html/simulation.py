"""A simulated schedule as a page: its chunks under way in simulated time, a lane per rank, and what it waited for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from ringside.errors import UsageError
from ringside.monitor.stats import Floats
from ringside.predict.plan.options import simulated_band
from ringside.predict.simulation.timeline import Timeline
from ringside.text import duration, giga, percent, size
from ringside.view.html.markup import NOTHING, Markup, embed_json, fill
from ringside.view.html.page import PREDICTION_STYLES, footer, note_line, render_page, table, tiles, verdict_section
from ringside.view.predict_text import band_parts, part_text, simulation_text
from ringside.view.schedule.arrange import arrange_vertices
from ringside.view.schedule.drawing import frame_svg, page_data
from ringside.view.schedule.frames import ScheduleFrames

MOST_MESSAGES = 20_000
SCALE = 1_000_000  # simulated time in whole numbers: so many from the beginning to the end
MOST_SHARES = 12

NOTE = (
    "A chunk leaves when its sender is ready for the round, and lies between the two as far as its time has passed, "
    "from the first byte sent to the last one received. It waits at its receiver until that one is ready, too. "
    "Its stripes are the ranks whose contribution it carries. Outlined cell: complete."
)


def timeline_page(timeline: Timeline) -> str:
    """Return the page of a simulated schedule; one file that needs no other.

    Schedules of more than 64 ranks, or of more chunks and messages than a picture holds, get lanes only.
    """
    schedule, topology, seconds = timeline.schedule, timeline.topology, timeline.seconds
    headline = f"{schedule.name} of {size(timeline.size_bytes)} among {schedule.ranks} ranks: {duration(seconds)}"
    late = [f"rank {rank} by {duration(late)}" for rank, late in timeline.late.items() if late]
    lines = [("Bottleneck", str(timeline.guilty)), ("Late", ", ".join(late)), ("Band", simulation_text(timeline))]
    value, ends = band_parts(simulated_band(timeline))
    figures = [
        ("on clusters like it", value, ends),
        ("first rank done", duration(float(timeline.finish_seconds.min())), ""),
        ("bus bandwidth", f"{giga(timeline.busbw)} GB/s", "as nccl-tests has it"),
        ("rounds", str(schedule.rounds), f"{schedule.chunks} chunks"),
    ]
    shares = sorted(timeline.shares.items(), key=lambda item: -item[1])[:MOST_SHARES]
    moving = _moving_figure(timeline)
    kind = "bad" if timeline.guilty.kind != "nobody" else "open"
    sections = [
        verdict_section(f"simulated on {topology.describe()}", headline, lines, kind=kind),
        moving,
        tiles(figures),
        gantt(timeline, "Every rank over time"),
        table(
            "What the critical path consists of",
            ("", "time", "share"),
            [(part_text(name), duration(part), percent(part / seconds)) for name, part in shares],
        ),
        footer(NOTE if moving else NOTE.rpartition("Its stripes")[0]),
    ]
    return render_page(
        headline,
        "simulation",
        topology.name,
        sections,
        styles=("schedule/drawing_svg.css", *PREDICTION_STYLES),
        scripts=("schedule/drawing_cells.js", "moving.js") if moving else (),
    )


def _moving_figure(timeline: Timeline) -> Markup:
    """Return the figure that moves, its controls and its data; nothing for what is too large to be drawn."""
    schedule = timeline.schedule
    if not schedule.rounds or timeline.seconds <= 0 or schedule.rounds * schedule.vertices > MOST_MESSAGES:
        return NOTHING
    try:
        story = ScheduleFrames(schedule)
        if sum(len(story.messages(k)) for k in range(schedule.rounds)) > MOST_MESSAGES:
            return NOTHING
    except UsageError:
        return NOTHING
    layout = arrange_vertices(story)

    def in_ticks(seconds: Floats) -> list[int]:
        ticks: list[int] = np.rint(seconds / timeline.seconds * SCALE).astype(np.int64).tolist()
        return ticks

    # What the script needs: the drawing's data, when every vertex was ready for every round, and by round every message
    # as sender, receiver, begin and arrival. Times are whole numbers, `scale` of them until the end.
    sent: list[list[int]] = [[] for _ in range(schedule.rounds)]
    for part in timeline.sent():
        times = in_ticks(part.begin_s), in_ticks(part.arrive_s)
        for message in zip(part.src.tolist(), part.dst.tolist(), *times, strict=True):
            sent[part.round] += message
    data = page_data(story, layout, []) | {
        "ready": [in_ticks(timeline.ready_for(k)) for k in range(schedule.rounds + 1)],
        "sent": sent,
        "scale": SCALE,
        "end": timeline.seconds,
    }
    return fill(
        """<figure class="moving" id="figure"><figcaption>{name} in simulated time</figcaption>
<div class="stage{wide}">{drawing}</div>
<div class="player" id="player" hidden><button type="button" id="play">Play</button>
<input type="range" id="seek" min="0" max="1000" value="0" aria-label="Simulated time"><output id="clock"></output>
<select id="speed" aria-label="Speed"><option value="0.25">¼ ×</option><option value="0.5">½ ×</option>
<option value="1" selected>1 ×</option><option value="2">2 ×</option><option value="4">4 ×</option></select></div>
</figure>
<script type="application/json" id="data">{data}</script>""",
        name=schedule.name,
        wide=" wide" if schedule.ranks > 8 else "",
        # The drawing escapes what it holds.
        drawing=Markup(frame_svg(next(story.frames()), layout, style=False)),
        data=embed_json(data),
    )


# -------------------------------------------------------------------------------------------------
# A lane per rank: what it sends above what it takes, and the critical path through.

MOST_LANES = 16
MOST_SPANS = 400_000
UNITS = 10_000.0
LANE = 20.0  # height of a lane in the drawing's own coordinates
LEAST = UNITS / 1500  # what is closer together than this is drawn as one piece
TICKS = 4
LEGEND = (
    ("lateness", Markup("own work, longer than the shortest rank's")),
    ("sending", "sending (above)"),
    ("taking", "being sent to (below), latency included"),
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
            template = '<rect class="late" x="0" y="{}" width="{:.1f}" height="15"><title>{}</title></rect>'
            label = f"rank {rank} works {duration(seconds)} longer"
            shapes.append(fill(template, LANE * rows[rank] + 2.5, UNITS * seconds / end, label))
    for (kind, vertex), pieces in _message_spans(timeline, lanes).items():
        y = LANE * rows[vertex] + (2.5 if kind == "sends" else 10.5)
        for begin, until in _merge_spans(UNITS * pieces / end):
            template = '<rect class="{}" x="{:.1f}" y="{}" width="{:.1f}" height="7"/>'
            shapes.append(fill(template, kind, begin, y, max(until - begin, 3)))
    shapes.append(fill('<path class="end" d="M{:.1f} 0V{:.0f}"/>', UNITS * timeline.seconds / end, LANE * len(rows)))
    # The critical path goes from lane to lane; hops between ranks without a lane are left out.
    path, at = "", ""
    for hop in timeline.critical_path:
        if hop.src in rows and hop.dst in rows:
            leaves, arrives = (
                f"{round(UNITS * seconds / end, 1)} {LANE * rows[vertex] + LANE / 2}"
                for vertex, seconds in ((hop.src, hop.begin_s), (hop.dst, hop.end_s))
            )
            path += f"L{arrives}" if leaves == at else f"M{leaves}L{arrives}"
            at = arrives
    shapes.append(fill('<path class="path" d="{}"/>', path))

    names = []
    for vertex in lanes:
        name = f"rank {vertex}" if vertex < timeline.schedule.ranks else "switch"
        names.append(fill("<span{}>{}</span>", Markup(" class=culprit" if vertex in culprits else ""), name))
    order = f"{len(lanes)} of {timeline.schedule.ranks} ranks, in the order in which the critical path reaches them"
    left_out = order if timeline.schedule.vertices > MOST_LANES else ""
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
    """Return the vertices that get a lane, from the top: all of few; of many those that hold the critical path longest.

    Of many they are in the order in which the path reaches them, so that it goes down the picture.
    """
    count = timeline.schedule.vertices
    if count <= MOST_LANES:
        return list(range(count))
    on_path: Counter[int] = Counter()
    for hop in timeline.critical_path:
        for vertex in {hop.src, hop.dst}:
            on_path[vertex] += max(int(1e9 * (hop.end_s - hop.begin_s)), 1)
    guilty = [rank for rank in timeline.guilty.ranks if timeline.guilty.kind != "narrow host"]
    order = [*guilty, *(vertex for vertex, _ in on_path.most_common()), *range(count)]
    kept = list(dict.fromkeys(order))[:MOST_LANES]
    on_the_way = dict.fromkeys(vertex for hop in timeline.critical_path for vertex in (hop.src, hop.dst))
    places = {vertex: place for place, vertex in enumerate(on_the_way)}
    return sorted(kept, key=lambda vertex: (places.get(vertex, len(places)), vertex))


def _message_spans(timeline: Timeline, vertices: Sequence[int]) -> dict[tuple[str, int], Floats]:
    """Return when vertices send and are sent to.

    Returns:
        By (`sends` or `takes`, vertex), float64 [n, 2] of seconds, ascending; nothing where the timeline holds more
        than `MOST_SPANS` messages.
    """
    if timeline.schedule.rounds * timeline.schedule.vertices > MOST_SPANS:
        return {}
    found: defaultdict[tuple[str, int], list[Floats]] = defaultdict(list)
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

"""A simulated schedule as a page: its chunks under way in simulated time, a lane per rank, and what it waited for."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringside.errors import UsageError
from ringside.predict.plan.options import in_words, simulated_band
from ringside.predict.simulation.timeline import Timeline
from ringside.text import duration, giga, percent, size
from ringside.view.html.gantt import gantt
from ringside.view.html.markup import Markup, embed_json, fill
from ringside.view.html.page import PREDICTION_STYLES, footer, render_page, table, tiles, verdict_section
from ringside.view.schedule.arrange import arrange_vertices
from ringside.view.schedule.drawing import page_data
from ringside.view.schedule.frames import ScheduleFrames
from ringside.view.schedule.layout import GraphLayout
from ringside.view.schedule.svg import frame_svg

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
    lines = [
        ("Guilty", str(timeline.guilty)),
        ("Where", topology.describe()),
        ("Band", in_words(timeline)),
        ("Late", ", ".join(late)),
    ]
    ends = simulated_band(timeline)
    figures = [
        ("time", duration(seconds), f"{duration(ends.low)} to {duration(ends.high)} on clusters like it"),
        ("first rank done", duration(float(timeline.finish_seconds.min())), ""),
        ("bus bandwidth", f"{giga(timeline.busbw)} GB/s", "as nccl-tests has it"),
        ("rounds", str(schedule.rounds), f"{schedule.chunks} chunks"),
    ]
    shares = sorted(timeline.shares.items(), key=lambda item: -item[1])[:MOST_SHARES]
    moving = _moving_figure(timeline)
    kind = "bad" if timeline.guilty.kind != "nobody" else "open"
    sections = [
        verdict_section("simulated", headline, lines, kind=kind),
        tiles(figures),
        *moving,
        gantt(timeline, "Every rank over time"),
        table(
            "What the critical path consists of",
            ("", "seconds", "share"),
            [(name, duration(part), percent(part / seconds)) for name, part in shares],
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


def _moving_figure(timeline: Timeline) -> list[Markup]:
    """Return the figure that moves, its controls and its data; nothing for what is too large to be drawn."""
    schedule = timeline.schedule
    if not schedule.rounds or timeline.seconds <= 0 or schedule.rounds * schedule.vertices > MOST_MESSAGES:
        return []
    try:
        story = ScheduleFrames(schedule)
        if sum(len(story.messages(k)) for k in range(schedule.rounds)) > MOST_MESSAGES:
            return []
    except UsageError:
        return []
    layout = arrange_vertices(story)
    figure = fill(
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
        data=embed_json(moving_data(timeline, story, layout)),
    )
    return [figure]


def moving_data(timeline: Timeline, story: ScheduleFrames, layout: GraphLayout) -> dict[str, Any]:
    """Return what the script needs: the drawing's data, and when everybody was ready and every message under way.

    Times are whole numbers, `scale` of them until the end: `ready` by round and vertex, `sent` by round as sender,
    receiver, begin and arrival, one message after the other.
    """
    ready = [_to_ticks(timeline.ready_for(k), timeline) for k in range(timeline.schedule.rounds + 1)]
    sent: list[list[int]] = [[] for _ in range(timeline.schedule.rounds)]
    for part in timeline.sent():
        begin, arrive = _to_ticks(part.begin_s, timeline), _to_ticks(part.arrive_s, timeline)
        for message in zip(part.src.tolist(), part.dst.tolist(), begin, arrive, strict=True):
            sent[part.round] += message
    plain = page_data(story, layout, [])
    return plain | {"ready": ready, "sent": sent, "scale": SCALE, "end": timeline.seconds}


def _to_ticks(seconds: np.ndarray, timeline: Timeline) -> list[int]:
    ticks: list[int] = np.rint(seconds / timeline.seconds * SCALE).astype(np.int64).tolist()
    return ticks

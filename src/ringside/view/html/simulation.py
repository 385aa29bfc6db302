"""A simulated schedule as a page: its chunks under way in simulated time, a lane per rank, and what it waited for."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from ringside.errors import UsageError
from ringside.predict.plan.simulated_band import in_words, simulated_band
from ringside.predict.simulation.timeline import Timeline
from ringside.text import digits, duration, size
from ringside.view.html.gantt import gantt
from ringside.view.html.page import footer, page, table, tiles, verdict
from ringside.view.schedule.arrange import arranged
from ringside.view.schedule.drawing import page_data
from ringside.view.schedule.frames import ScheduleFrames
from ringside.view.schedule.layout import GraphLayout
from ringside.view.schedule.svg import asset, frame_svg

MOST_MESSAGES = 20_000
SCALE = 1_000_000  # simulated time in whole numbers: so many from the beginning to the end
MOST_SHARES = 12

NOTE = (
    "A chunk leaves when its sender is ready for the round, and lies between the two as far as its time has passed, "
    "from the first byte sent to the last one received. It waits at its receiver until that one is ready, too. "
    "Its stripes are the ranks whose contribution it carries. Outlined cell: complete."
)


def timeline_page(timeline: Timeline) -> str:
    """Return a page that plays a simulated schedule; one file that needs no other.

    Schedules of more than 64 ranks, or of more chunks and messages than a picture holds, get lanes only.
    """
    schedule, topology = timeline.schedule, timeline.topology
    headline = (
        f"{schedule.name} of {size(timeline.size_bytes)} among {schedule.ranks} ranks: {duration(timeline.seconds)}"
    )
    guilty = timeline.guilty.kind != "nobody"
    moving = list(_moving(timeline))
    body = [
        verdict("simulated", headline, _lines(timeline), "bad" if guilty else "open"),
        tiles(_tiles(timeline)),
        *moving,
        gantt(timeline, "Every rank over time"),
        table("What the critical path consists of", ("", "seconds", "share"), _shares(timeline)),
        footer(NOTE if moving else NOTE.rpartition("Its stripes")[0]),
    ]
    scripts = asset("drawing_cells.js") + asset("moving.js") if moving else ""
    return page(headline, "simulation", body, meta=topology.name, css=("drawing_svg.css",), js=scripts)


def _lines(timeline: Timeline) -> Iterator[tuple[str, str]]:
    yield "Guilty", str(timeline.guilty)
    yield "Where", timeline.topology.describe()
    yield "Band", in_words(timeline)
    yield "Late", ", ".join(f"rank {rank} by {duration(seconds)}" for rank, seconds in timeline.late.items() if seconds)


def _tiles(timeline: Timeline) -> Iterator[tuple[str, str, str]]:
    ends = simulated_band(timeline)
    yield "time", duration(timeline.seconds), f"{duration(ends.low)} to {duration(ends.high)} on clusters like it"
    yield "first rank done", duration(float(timeline.finish_seconds.min())), ""
    yield "bus bandwidth", f"{digits(timeline.busbw / 1e9)} GB/s", "as nccl-tests has it"
    yield "rounds", str(timeline.schedule.rounds), f"{timeline.schedule.chunks} chunks"


def _shares(timeline: Timeline) -> Iterator[tuple[str, str, str]]:
    found = sorted(timeline.shares.items(), key=lambda item: -item[1])[:MOST_SHARES]
    for name, seconds in found:
        yield name, duration(seconds), f"{seconds / timeline.seconds:.0%}"


def _moving(timeline: Timeline) -> Iterator[str]:
    """Yield the figure that moves and its controls; nothing for what is too large to be drawn."""
    schedule = timeline.schedule
    if not schedule.rounds or timeline.seconds <= 0 or schedule.rounds * schedule.vertices > MOST_MESSAGES:
        return
    try:
        story = ScheduleFrames(schedule)
        if sum(len(story.messages(k)) for k in range(schedule.rounds)) > MOST_MESSAGES:
            return
    except UsageError:
        return
    layout = arranged(story)
    data = json.dumps(moving_data(timeline, story, layout), separators=(",", ":")).replace("</", "<\\/")
    drawing, wide = frame_svg(next(story.frames()), layout, style=False), " wide" * (schedule.ranks > 8)
    stage = f'<div class="stage{wide}">{drawing}</div>'
    title = html.escape(f"{schedule.name} in simulated time")
    yield f"""<figure class="moving" id="figure"><figcaption>{title}</figcaption>{stage}
<div class="player" id="player" hidden><button type="button" id="play">Play</button>
<input type="range" id="seek" min="0" max="1000" value="0" aria-label="Simulated time"><output id="clock"></output>
<select id="speed" aria-label="Speed"><option value="0.25">¼ ×</option><option value="0.5">½ ×</option>
<option value="1" selected>1 ×</option><option value="2">2 ×</option><option value="4">4 ×</option></select></div>
</figure>
<script type="application/json" id="data">{data}</script>"""


def moving_data(timeline: Timeline, story: ScheduleFrames, layout: GraphLayout) -> dict[str, Any]:
    """Return what the script needs: the drawing's data, and when everybody was ready and every message under way.

    Times are whole numbers, `scale` of them until the end: `ready` by round and vertex, `sent` by round as sender,
    receiver, begin and arrival, one message after the other.
    """
    ready = [_whole(timeline.ready_for(k), timeline) for k in range(timeline.schedule.rounds + 1)]
    sent: list[list[int]] = [[] for _ in range(timeline.schedule.rounds)]
    for part in timeline.sent():
        begin, arrive = _whole(part.begin_s, timeline), _whole(part.arrive_s, timeline)
        for one in zip(part.src.tolist(), part.dst.tolist(), begin, arrive, strict=True):
            sent[part.round] += one
    plain = page_data(story, layout, [])
    return plain | {"ready": ready, "sent": sent, "scale": SCALE, "end": timeline.seconds}


def _whole(seconds: np.ndarray, timeline: Timeline) -> list[int]:
    whole: list[int] = np.rint(seconds / timeline.seconds * SCALE).astype(np.int64).tolist()
    return whole

"""The picture of a schedule: who sends which chunk to whom in every round, and what every chunk already contains.

`schedule_svg` is one round as a figure, `schedule_sheet` all of them (or the first ones) side by side, for a README;
`schedule_html` is a page that steps and plays through all of them. All only read the schedule. The page carries the
messages as numbers and works out in its own script what every chunk contains, so it stays small.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from itertools import islice
from typing import Any

import numpy as np

from ringside.errors import UsageError
from ringside.schedule import Audit, Schedule, verify
from ringside.text import counted
from ringside.view.assets import read_asset
from ringside.view.schedule.arrange import arrange_vertices
from ringside.view.schedule.frames import ScheduleFrames
from ringside.view.schedule.layout import GraphLayout
from ringside.view.schedule.svg import MOST_PANELS, frame_svg, look_of, rank_colour, sheet_svg
from ringside.view.schedule.text import caption, messages_in_words

# More messages than this are put into words by pattern, not one by one.
MOST_WORDS = 400


def schedule_svg(schedule: Schedule, round: int) -> str:
    """Return one round of a schedule as a self-contained SVG figure.

    Args:
        schedule: A well-formed schedule of at most 64 ranks.
        round: The round to show, or `schedule.rounds` for the end.

    Raises:
        UsageError: The schedule is too large for a picture, or it has no such round.
    """
    if not 0 <= round <= schedule.rounds:
        raise UsageError(f"{schedule.name} of {schedule.ranks} ranks has rounds 0 to {schedule.rounds}, not {round}")
    story = ScheduleFrames(schedule)
    return frame_svg(next(islice(story.frames(), round, None)), arrange_vertices(story))


def schedule_sheet(schedule: Schedule, title: str = "") -> str:
    """Return all rounds of a schedule and its end side by side as one SVG; of more than 11 rounds the first 12.

    Args:
        schedule: A well-formed schedule of at most 64 ranks.
        title: The heading; its name, ranks, chunks and rounds by default.

    Raises:
        UsageError: The schedule is too large for a picture.
    """
    story = ScheduleFrames(schedule)
    shown = list(islice(story.frames(), MOST_PANELS))
    left_out = max(0, schedule.rounds - MOST_PANELS)
    heading = f"{title or _title(schedule)}: {counted(schedule.chunks, 'chunk')}, {counted(schedule.rounds, 'round')}"
    return sheet_svg(shown, arrange_vertices(story), heading, left_out)


def schedule_html(schedule: Schedule, title: str = "") -> str:
    """Return a page that steps and plays through a schedule; one file that needs no other.

    Args:
        schedule: A well-formed schedule of at most 64 ranks.
        title: The heading; its name and ranks by default.

    Raises:
        UsageError: The schedule is too large for a picture.
    """
    story = ScheduleFrames(schedule)
    layout = arrange_vertices(story)
    # One frame at a time, as many are large; a caption needs what the next one completes.
    frames, captions = story.frames(), []
    first = before = next(frames)
    for frame in frames:
        captions.append(caption(before, frame.complete))
        before = frame
    captions.append(caption(before, None))
    steps = [story.messages(k) for k in range(schedule.rounds)]
    many = any(look_of(len(messages), schedule.ranks) != "full" for messages in steps)
    every = sum(map(len, steps)) <= MOST_WORDS
    words = [messages_in_words(story, messages) if every else text for messages, text in zip(steps, captions)]  # noqa: B905
    items = [f'<li value="{k}" id="words-{k}">{escape(text)}</li>' for k, text in enumerate(words)]
    fields = {
        "title": escape(title or _title(schedule)),
        "facts": _facts(verify(schedule), story),
        "css": read_asset("schedule/drawing_svg.css") + read_asset("schedule/drawing_page.css"),
        "svg": frame_svg(first, layout, style=False),
        "least": f"{min(0.4 * layout.box[2], 1000):.0f}",
        "most": f"{1.3 * layout.box[2]:.0f}",
        "size": "huge" if schedule.ranks > 16 else "large" if layout.box[3] > 640 else "small",
        "caption": escape(captions[0]),
        "name": first.name,
        "span": f"of 0 to {schedule.rounds - 1}" if schedule.rounds else "",
        "last": str(schedule.rounds),
        "legend": _legend(story, layout, many),
        "words": "".join(items) or "<li>Nothing is sent.</li>",
        "data": json.dumps(page_data(story, layout, captions), separators=(",", ":")).replace("</", "<\\/"),
        "js": read_asset("schedule/drawing_cells.js") + read_asset("schedule/drawing.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: fields[hole[1]], read_asset("schedule/drawing.html"))


def _title(schedule: Schedule) -> str:
    return f"{schedule.name}, {counted(schedule.ranks, 'rank')}"


def page_data(story: ScheduleFrames, layout: GraphLayout, captions: Sequence[str]) -> dict[str, Any]:
    """Return what the page's script needs, as plain data; it works out the rest.

    Messages of a round are one list of integers: for each its link * 2 + 1 if it is added, the number of its parts,
    and the parts. A link is source node, destination node, and the six coordinates of its curve.
    """
    s, links = story.schedule, _Links(layout)
    rounds = [links.coded(story, k) for k in range(s.rounds)]
    # Of every node its vertex, its parts (None: all), columns, pitch and offset of its cells, its disc.
    across, down = layout.sizes.pitch
    cards = []
    for index, node in enumerate(layout.nodes):
        x, y = next(iter(layout.cell_at(index)), (0.0, 0.0))
        parts = None if len(node.parts) == len(layout.stripe_of) else list(node.parts)
        places = (across, down, x, y, node.x, node.y)
        columns = layout.sizes.columns(len(node.parts))
        cards.append([node.vertex, parts, columns, *(round(value, 1) for value in places)])
    everybody = story.holders.all() and story.required[: s.ranks].all()
    return {
        "ranks": s.ranks,
        "switches": s.switches,
        "once": story.once,
        "parts": len(story.members),
        "chunks": [list(chunks) for chunks in story.members] if len(story.members) < s.chunks else None,
        "holders": None if everybody else [np.flatnonzero(column).tolist() for column in story.holders.T],
        "wants": None if everybody else [np.flatnonzero(column).tolist() for column in story.required.T],
        "colours": [rank_colour(rank, s.ranks) for rank in range(s.ranks)],
        "strips": layout.sizes.strips,
        "labels": layout.labels,
        "at": [layout.label_at, layout.alone_at],
        "cell": layout.sizes.cell,
        "disc": layout.sizes.disc,
        "trees": layout.stripes,
        "cards": cards,
        "links": links.drawn,
        "rounds": rounds,
        "captions": list(captions),
    }


class _Links:
    """The links that messages go over, numbered as they turn up."""

    def __init__(self, layout: GraphLayout) -> None:
        self._layout = layout
        self._number: dict[tuple[int, int], int] = {}
        self.drawn: list[list[float]] = []

    def coded(self, story: ScheduleFrames, k: int) -> list[int]:
        """Return round k as integers."""
        code: list[int] = []
        for message in story.messages(k):
            for stripe in range(self._layout.stripes):
                parts = [part for part in message.parts if self._layout.stripe_of[part] == stripe]
                if parts:
                    ends = self._layout.node(message.src, stripe), self._layout.node(message.dst, stripe)
                    if ends not in self._number:
                        self._number[ends] = len(self.drawn)
                        curve = self._layout.curve(*ends)
                        self.drawn.append([*ends, *(round(value, 1) for point in curve for value in point)])
                    code += [2 * self._number[ends] + message.reducing, len(parts), *parts]
        return code


def _facts(audit: Audit, story: ScheduleFrames) -> str:
    parts = len(story.members)
    alike = f" (those that travel alike are drawn as one of {parts})" if parts < audit.chunks else ""
    facts = [
        f"{counted(audit.chunks, 'chunk')}{alike}",
        counted(audit.rounds, "round"),
        f"each rank sends up to {float(audit.max_bytes_sent):.4g} × the tensor",
        counted(audit.max_ports, "port"),
        f"proved right: {str(audit.collective).replace('_', '-')}"
        if audit.ok
        else f"WRONG: {audit.problems[0].message}",
    ]
    return " · ".join(escape(fact) for fact in facts)


def _legend(story: ScheduleFrames, layout: GraphLayout, many: bool) -> str:
    ranks = story.schedule.ranks
    swatches = "".join(f'<i style="background:{rank_colour(rank, ranks)}"></i>' for rank in range(min(ranks, 16)))
    several = int(story.holders.sum(axis=0).max(initial=1))
    if several == 1:
        texts = [
            f'a filled cell holds its chunk, in the colour of the rank it comes from<b class="swatches">{swatches}</b>'
        ]
    elif layout.sizes.strips:
        texts = [f'a cell has one strip per rank<b class="swatches">{swatches}</b>whose contribution it contains']
    else:
        texts = ["a cell fills up with the share of ranks whose contribution it contains"]
    if layout.stripes > 1:
        texts.append('<em class="tree0">tree 1</em> and <em class="tree1">tree 2</em> each carry half of the tensor')
    if many:
        texts.append("point at a rank to see its messages alone")
    return "</span><span>".join(texts)

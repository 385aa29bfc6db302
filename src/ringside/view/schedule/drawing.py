"""The picture of a schedule: who sends which chunk to whom in every round, and what every chunk already contains.

`schedule_svg` is one round as a figure, `schedule_sheet` all of them (or the first ones) side by side, for a README;
`schedule_html` is a page that steps and plays through all of them. All only read the schedule. The page carries the
messages as numbers and works out in its own script what every chunk contains, so it stays small.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby, islice, product
from typing import Any

import numpy as np

from ringside.errors import UsageError
from ringside.schedule import Schedule, verify
from ringside.text import counted, name_vertices
from ringside.view import read_asset
from ringside.view.schedule.arrange import arrange_vertices
from ringside.view.schedule.frames import Frame, ScheduleFrames
from ringside.view.schedule.layout import Curve, GraphLayout, Pills, Point, on_curve
from ringside.view.schedule.text import caption, messages_in_words

MOST_WORDS = 400
"""More messages are put into words by pattern, not one by one."""

MOST_PANELS = 12
"""More rounds are cut off on a sheet."""


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
    layout = arrange_vertices(story)
    frames = list(islice(story.frames(), MOST_PANELS))
    heading = f"{title or _title(schedule)}: {counted(schedule.chunks, 'chunk')}, {counted(schedule.rounds, 'round')}"
    left, top, wide, high = layout.box
    # As wide as one and a half times its height, at most four side by side.
    columns = max(1, min(len(frames), 4, round((len(frames) * high / wide * 1.5) ** 0.5)))
    while columns > 1 and len(frames) % columns == 1:  # no figure alone in the last row
        columns += 1
    scale = 300 / max(wide, high * 0.7)
    across, down = wide * scale + 24, high * scale + 34
    panels, captions = "", []
    for i, frame in enumerate(frames):
        x, y = 12 + i % columns * across, 52 + i // columns * down
        name = " · ".join(filter(None, (frame.name.lower(), frame.phase)))
        panels += (
            f'<text class="title" x="{number(x)}" y="{number(y + 4)}">{name}</text>'
            f'<g transform="translate({number(x - left * scale)} {number(y + 14 - top * scale)}) scale({scale:.4f})">'
            f"{scene(frame, layout)}</g>"
        )
        # What a round completes shows in the frame after it; of the last one on the sheet that is not there.
        after = frames[i + 1] if i + 1 < len(frames) else frame
        captions.append(f"{frame.heading}: {caption(frame, after.complete if frame.messages else None)}")
    rows = -(-len(frames) // columns)
    left_out, ended = schedule.rounds - MOST_PANELS, frames[-1].name == "Done"
    note = f"and {counted(left_out, 'more round')}" if left_out > 0 else "" if ended else "and the end"
    width, height = max(columns * across, 9 * len(heading) + 24), 52 + rows * down + (26 if note else 0)
    more = f'<text class="more" x="12" y="{number(height - 16)}">{note}</text>' if note else ""
    words, name, style = escape(" ".join(captions)), escape(heading), read_asset("schedule/drawing_svg.css")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ringside-drawing sheet" viewBox="0 0 {number(width)} '
        f'{number(height)}" width="{number(width)}" height="{number(height)}" role="img" aria-label="{name}">'
        f"<title>{name}</title><desc>{words}</desc><style>{style}</style>"
        f'<text class="title" x="12" y="24">{name}</text>{panels}{more}</svg>'
    )


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
    frames, captions, names = story.frames(), [], []
    first = before = next(frames)
    for frame in frames:
        captions.append(caption(before, frame.complete))
        names.append(before.heading)
        before = frame
    captions.append(caption(before, None))
    names.append(before.heading)
    steps = [story.messages(k) for k in range(schedule.rounds)]
    many = any(look_of(len(messages), schedule.ranks) != "full" for messages in steps)
    every = sum(map(len, steps)) <= MOST_WORDS
    words = [messages_in_words(story, messages) if every else text for messages, text in zip(steps, captions)]  # noqa: B905
    items = [f'<li value="{k + 1}" id="words-{k}">{escape(text)}</li>' for k, text in enumerate(words)]
    phases = [(name, len(list(run))) for name, run in groupby(story.phases)]
    band = [f'<li style="flex-grow:{count}">{escape(name)}</li>' for name, count in phases] if len(phases) > 1 else []
    fields = {
        "title": escape(title or _title(schedule)),
        "facts": escape(_cost(story)),
        "css": read_asset("schedule/drawing_svg.css") + read_asset("schedule/drawing_page.css"),
        "svg": frame_svg(first, layout, style=False),
        "least": f"{min(0.4 * layout.box[2], 1000):.0f}",
        "most": f"{1.3 * layout.box[2]:.0f}",
        "wide": " wide" if layout.box[2] > 2 * layout.box[3] else "",
        "size": "huge" if schedule.ranks > 16 else "large" if layout.box[3] > 640 else "small",
        "caption": escape(captions[0]),
        "lines": str(-(-max(map(len, captions)) // 40)),
        "name": escape(names[0]),
        "phases": "".join(band),
        "last": str(schedule.rounds),
        "legend": _legend(story, layout, many),
        "words": "".join(items) or "<li>Nothing is sent.</li>",
        "data": json.dumps(page_data(story, layout, captions) | {"names": names}, separators=(",", ":")).replace(
            "</", "<\\/"
        ),
        "js": read_asset("schedule/drawing_cells.js") + read_asset("schedule/drawing.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: fields[hole[1]], read_asset("schedule/drawing.html"))


def _title(schedule: Schedule) -> str:
    return f"{schedule.name}, {counted(schedule.ranks, 'rank')}"


def _cost(story: ScheduleFrames) -> str:
    """Return in one line what a schedule costs, beside the least that its collective can cost."""
    audit = verify(story.schedule)
    rounds, sent, least = counted(audit.rounds, "round"), audit.max_bytes_sent, audit.lower_bound_bytes
    fewest, one_peer = audit.lower_bound_rounds, " with one peer at a time"
    if audit.rounds != fewest:
        rounds += f" (lower bound{one_peer if audit.rounds < fewest else ''}: {fewest})"
    sends = f"each rank sends up to {float(sent):.4g} × the tensor"
    if sent != least:
        beaten = f", beaten by {audit.beats_bounds}" if sent < least else ""
        sends += f" (lower bound: {float(least):.4g}{beaten})"
    elif audit.collective.name == "all_reduce" and least:
        sends += ", optimal: (n−1)/n to add + (n−1)/n as sums"
    alike = f" (drawn as {len(story.members)})" if len(story.members) < audit.chunks else ""
    ports = f"up to {audit.max_ports} peers" if audit.max_ports > 1 else "one peer"
    proof = f"verified {str(audit.collective).replace('_', '-')}"
    if not audit.ok:
        proof = f"WRONG: {audit.problems[0].message}"
    return " · ".join([rounds, sends, f"{counted(audit.chunks, 'chunk')}{alike}", f"{ports} at a time", proof])


def page_data(story: ScheduleFrames, layout: GraphLayout, captions: Sequence[str]) -> dict[str, Any]:
    """Return what the page's script needs, as plain data; it works out the rest.

    Messages of a round are one list of integers: for each its link * 2 + 1 if it is added, the number of its parts,
    and the parts. A link is source node, destination node, and the six coordinates of its curve.
    """
    s = story.schedule
    # Links are numbered as they turn up.
    numbers: dict[tuple[int, int], int] = {}
    links: list[list[float]] = []
    rounds: list[list[int]] = [[] for _ in range(s.rounds)]
    for k, code in enumerate(rounds):
        for message, stripe in product(story.messages(k), range(layout.stripes)):
            parts = [part for part in message.parts if layout.stripe_of[part] == stripe]
            if parts:
                ends = layout.node(message.src, stripe), layout.node(message.dst, stripe)
                if ends not in numbers:
                    numbers[ends] = len(links)
                    links.append([*ends, *(round(value, 1) for point in layout.curve(*ends) for value in point)])
                code += [2 * numbers[ends] + message.reducing, len(parts), *parts]
    # Of every node its vertex, its parts (None: all), columns, pitch and offset of its cells, its disc.
    across, down = layout.sizes.pitch
    cards = []
    for index, node in enumerate(layout.nodes):
        x, y = next(iter(layout.cell_at(index)), (0.0, 0.0))
        shown = None if len(node.parts) == len(layout.stripe_of) else list(node.parts)
        columns = layout.sizes.columns(len(node.parts))
        places = (across, down, x, y, node.x, node.y)
        cards.append([node.vertex, shown, columns, *(round(value, 1) for value in places)])
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
        "links": links,
        "rounds": rounds,
        "captions": list(captions),
    }


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
        trees = '<em class="tree0">tree 1</em> and <em class="tree1">tree 2</em>, upside down,'
        texts.append(f"{trees} each carry half of the tensor: the leaves of one are mostly inner nodes of the other")
    if many:
        texts.append("point at a rank to see its messages alone")
    return "</span><span>".join(texts)


# -------------------------------------------------------------------------------------------------
# One frame as SVG.
#
# What changes from frame to frame is a few paths per vertex, one for each contribution; `drawing.js` writes the same.


def rank_colour(rank: int, ranks: int) -> str:
    """Return a rank's colour as #rrggbb: hues evenly around the OKLCH circle, neighbours a little lighter or darker."""
    # B. Ottosson's OKLab in polar form (OKLCH) as sRGB.
    hue = math.radians(262 + 360 * rank / max(ranks, 3))
    lightness, a, b = 0.66 + (0.07 if rank % 2 else -0.03), 0.135 * math.cos(hue), 0.135 * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    red = 4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short
    green = -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short
    blue = -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short
    codes = []
    for linear in (min(max(channel, 0.0), 1.0) for channel in (red, green, blue)):
        # The gamma of sRGB (IEC 61966-2-1), straight near black.
        encoded = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
        codes.append(f"{round(255 * encoded):02x}")
    return "#" + "".join(codes)


def frame_svg(frame: Frame, layout: GraphLayout, *, style: bool = True) -> str:
    """Return a frame as a self-contained SVG figure; without its style sheet if a page has it already."""
    view = " ".join(number(value) for value in layout.box)
    schedule = frame.story.schedule
    label = f"{schedule.name} on {counted(schedule.ranks, 'rank')}: {frame.name.lower()}"
    sheet = f"<style>{read_asset('schedule/drawing_svg.css')}</style>" if style else ""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ringside-drawing" viewBox="{view}" role="img" '
        f'aria-label="{escape(label)}">{sheet}{scene(frame, layout)}</svg>'
    )


def scene(frame: Frame, layout: GraphLayout) -> str:
    """Return everything in a picture: outlines, rails, arrows, vertices, names of trees."""
    # What lies under everything never changes.
    rooms = ""
    for room in layout.rooms:
        outline = "L".join(f"{x:.1f} {y:.1f}" for x, y in room.outline)
        rooms += f'<path class="room" d="M{outline}Z"/>'
        rooms += f'<text class="note" x="{number(room.at[0])}" y="{number(room.at[1])}">{room.name}</text>'
    rails = "".join(
        f'<path class="rail{_tree(layout, layout.nodes[a].stripe)}" d="M{_point(p)}L{_point(q)}"/>'
        for a, b in layout.rails
        for p, q in [layout.rail(a, b)]
    )
    notes = "".join(
        f'<text class="note{_tree(layout, stripe)}" x="{number(x)}" y="{number(y)}">{text}</text>'
        for text, (x, y), stripe in layout.notes
    )
    return (
        f'<g class="ground">{rooms}{rails}{notes}</g><g class="arrows">{arrows(frame, layout)}</g>'
        f'<g class="nodes">{"".join(_node(frame, layout, i) for i in range(len(layout.nodes)))}</g>'
    )


def _tree(layout: GraphLayout, stripe: int) -> str:
    return f" tree{stripe}" if layout.stripes > 1 else ""


# ---- vertices


def _node(frame: Frame, layout: GraphLayout, index: int) -> str:
    node, sizes = layout.nodes[index], layout.sizes
    schedule = frame.story.schedule
    name = name_vertices([node.vertex], schedule.ranks)
    box = ""
    if node.box:
        left, top, right, bottom = node.box
        box = (
            f'<rect class="plate{_tree(layout, node.stripe)}" x="{number(left)}" y="{number(top)}" '
            f'width="{number(right - left)}" height="{number(bottom - top)}" rx="10"/>'
        )
    place = f'x="{number(node.x)}" y="{number(node.y)}"'
    if node.vertex < schedule.ranks:
        disc = (
            f'<circle class="disc" cx="{number(node.x)}" cy="{number(node.y)}" r="{number(sizes.disc)}" '
            f'fill="{rank_colour(node.vertex, schedule.ranks)}"/><text class="name" {place}>{node.vertex}</text>'
        )
    else:
        wide, high = sizes.disc * 1.55, sizes.disc * 0.95
        corners = [(-wide, 0), (-wide * 0.66, -high), (wide * 0.66, -high), (wide, 0), (wide * 0.66, high)]
        corners.append((-wide * 0.66, high))
        hexagon = "M" + "L".join(_point((node.x + x, node.y + y)) for x, y in corners) + "Z"
        disc = f'<path class="switch" d="{hexagon}"/><text class="name switched" {place}>switch</text>'
    # Every cell has its name, or the first one of every row.
    names, cells = "", list(zip(node.parts, layout.cell_at(index), strict=True))
    if sizes.named:
        for part, (x, y) in cells:
            label = frame.story.name(part)
            names += f'<text class="chunk" x="{number(x + sizes.cell / 2)}" y="{number(y - 4)}">{label}</text>'
    elif sizes.lead:
        for part, (x, y) in cells[:: sizes.columns(len(node.parts))]:
            label = frame.story.name(part)
            names += f'<text class="chunk row" x="{number(x - 4)}" y="{number(y + sizes.cell / 2)}">{label}</text>'
    return (
        f'<g class="node" data-vertex="{node.vertex}"><title>{name}</title>{box}{disc}'
        f'<g class="cells" transform="translate({_point(node.card)})">'
        f"{names}{_cells(frame, layout, index)}</g></g>"
    )


def _cells(frame: Frame, layout: GraphLayout, index: int) -> str:
    node, size, story = layout.nodes[index], layout.sizes.cell, frame.story
    corners = layout.cell_at(index)
    paths = [_path("track", (_rectangle(x, y, size, size) for x, y in corners))]
    if layout.sizes.strips:
        # One path for every contributing rank: its strip in all cells that contain it.
        strips: dict[int, list[str]] = {}
        for part, (x, y) in zip(node.parts, corners, strict=True):
            holders = np.flatnonzero(story.holders[:, part]).tolist()
            wide = size / len(holders)
            for place, rank in enumerate(holders):
                if frame.held[node.vertex, part, rank]:
                    strips.setdefault(rank, []).append(_rectangle(x + place * wide, y, wide, size))
        for rank in sorted(strips):
            colour = rank_colour(rank, story.schedule.ranks)
            paths.append(_path("part", strips[rank], f' fill="{colour}" data-rank="{rank}"'))
    else:
        # As high as the share of the ranks whose contribution it contains.
        levels = []
        for part, (x, y) in zip(node.parts, corners, strict=True):
            share = np.count_nonzero(frame.held[node.vertex, part]) / max(1, story.holders[:, part].sum())
            if share:
                up = min(share, 1) * size
                levels.append(_rectangle(x, y + size - up, size, up))
        paths.append(_path("level", levels))
    for name, table in (("done", frame.done), ("double", frame.double)):
        marked = [place for part, place in zip(node.parts, corners, strict=True) if table[node.vertex, part]]
        paths.append(_path(name, (_rectangle(x - 1, y - 1, size + 2, size + 2) for x, y in marked)))
    return "".join(paths)


def _path(name: str, pieces: Iterable[str], more: str = "") -> str:
    drawn = "".join(pieces)
    return f'<path class="{name}"{more} d="{drawn}"/>' if drawn else ""


def _rectangle(x: float, y: float, wide: float, high: float) -> str:
    return f"M{number(x)} {number(y)}h{number(wide)}v{number(high)}h{number(-wide)}z"


# ---- arrows


def arrows(frame: Frame, layout: GraphLayout) -> str:
    """Return a round's arrows."""
    links = {(message.src, message.dst) for message in frame.messages}
    schedule = frame.story.schedule
    look = look_of(len(frame.messages), schedule.ranks)
    pills, drawn = Pills(layout), []
    for message in frame.messages:
        label_at = layout.label_at if (message.dst, message.src) in links else layout.alone_at
        colour = ""
        if look != "full" and message.src < schedule.ranks:
            own = rank_colour(message.src, schedule.ranks)
            colour = f' style="--add:{own};--copy:{own}"'
        kind = ("add" if message.reducing else "copy") + ("" if look == "full" else f" thin {look}")
        for stripe in sorted({layout.stripe_of[part] for part in message.parts}):
            parts = [part for part in message.parts if layout.stripe_of[part] == stripe]
            curve = layout.curve(layout.node(message.src, stripe), layout.node(message.dst, stripe))
            label = ""
            if layout.labels and look in ("full", "thin"):
                label = _label(frame.story.label(parts), message.reducing, look, pills, curve, label_at)
            # The head: a triangle along the end of the curve.
            start, control, end = curve
            scale = 1 if look == "full" else 0.7
            along = np.array(end) - np.array(control)
            along /= np.hypot(*along)
            across = np.array([-along[1], along[0]])
            back = np.array(end) - 9 * scale * along
            corners = (np.array(end) + 2 * along, back + 4.6 * scale * across, back - 4.6 * scale * across)
            head = "L".join(_point((float(x), float(y))) for x, y in corners)
            drawn.append(
                f'<g class="arrow {kind}{_tree(layout, stripe)}" data-src="{message.src}" data-dst="{message.dst}"'
                f'{colour}><path class="line" d="M{_point(start)}Q{_point(control)} {_point(end)}"/>'
                f'<path class="head" d="M{head}Z"/>{label}</g>'
            )
    return "".join(drawn)


def look_of(messages: int, ranks: int) -> str:
    """Return how a round's arrows look: `full`, with labels; too many for that: `thin`, `crowded` or `dense`."""
    if messages <= 2 * ranks or ranks <= 3:
        return "full"
    return "thin" if messages <= 32 else "crowded" if messages <= 400 else "dense"


def _label(text: str, reducing: bool, look: str, pills: Pills, curve: Curve, offset: float) -> str:
    """Return an arrow's label; among thin arrows only if there is room for it."""
    if look == "thin":
        spot = pills.place(curve, 0.3, 8 * len(text), 14)
        mini = f'<text class="mini">{text}</text>'
        return f'<g class="pill" transform="translate({_point(spot)})">{mini}</g>' if spot else ""
    text = f"{'+' if reducing else '='} {text}"
    wide = 7 * len(text) + 12
    spot = pills.place(curve, offset, wide, 19)
    if spot is None:  # labels that cover each other cannot be read: a dot, and the words on the page
        dot = '<circle class="dot" r="3.5"/>'
        return f'<g class="pill" transform="translate({_point(on_curve(curve, offset))})">{dot}</g>'
    return (
        f'<g class="pill" transform="translate({_point(spot)})">'
        f'<rect x="{number(-wide / 2)}" y="-9.5" width="{wide}" height="19" rx="8"/><text>{text}</text></g>'
    )


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _point(point: Point) -> str:
    return f"{number(point[0])} {number(point[1])}"

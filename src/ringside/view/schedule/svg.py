"""One frame of a schedule as SVG, and several of them side by side in one file.

What changes from frame to frame is a few paths per vertex, one for each contribution; `drawing.js` writes the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

import numpy as np

from ringside.text import counted
from ringside.view.assets import read_asset
from ringside.view.schedule.frames import Frame
from ringside.view.schedule.layout import Curve, GraphLayout, Pills, Point, on_curve
from ringside.view.schedule.text import caption, vertex_name

# -------------------------------------------------------------------------------------------------
# The ranks' colours, evenly around a circle of hues.


def rank_colour(rank: int, ranks: int) -> str:
    """Return a rank's colour as #rrggbb: hues evenly around the OKLCH circle, neighbours a little lighter or darker."""
    hue = math.radians(262 + 360 * rank / max(ranks, 3))
    lightness = 0.66 + (0.07 if rank % 2 else -0.03)
    return _srgb(lightness, 0.135, hue)


def _srgb(lightness: float, chroma: float, hue: float) -> str:
    """B. Ottosson's OKLab in polar form (OKLCH) as sRGB."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
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


# On a sheet: more rounds than this are cut off.
MOST_PANELS = 12


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


def sheet_svg(frames: Sequence[Frame], layout: GraphLayout, title: str, left_out: int) -> str:
    """Return frames side by side, each under its name, with a title over them and what was left out below them.

    Args:
        frames: One or more frames.
        layout: Their layout.
        title: The heading.
        left_out: How many further rounds there are.
    """
    _, _, wide, high = layout.box
    # As wide as one and a half times its height, at most four side by side.
    columns = max(1, min(len(frames), 4, round((len(frames) * high / wide * 1.5) ** 0.5)))
    scale = 300 / max(wide, high * 0.7)
    across, down = wide * scale + 24, high * scale + 34
    left, top = layout.box[:2]
    panels, captions = "", []
    for i, frame in enumerate(frames):
        x, y = 12 + i % columns * across, 52 + i // columns * down
        panels += (
            f'<text class="title" x="{number(x)}" y="{number(y + 4)}">{frame.name.lower()}</text>'
            f'<g transform="translate({number(x - left * scale)} {number(y + 14 - top * scale)}) scale({scale:.4f})">'
            f"{scene(frame, layout)}</g>"
        )
        # What a round completes shows in the frame after it; of the last one on the sheet that is not there.
        after = frames[i + 1] if i + 1 < len(frames) else frame
        captions.append(f"{frame.name}: {caption(frame, after.complete if frame.messages else None)}")
    rows = -(-len(frames) // columns)
    cut = frames[-1].name != "Done"
    note = f"and {counted(left_out, 'more round')}" if left_out else "and the end" if cut else ""
    width, height = max(columns * across, 9 * len(title) + 24), 52 + rows * down + (26 if note else 0)
    more = f'<text class="more" x="12" y="{number(height - 16)}">{note}</text>' if note else ""
    words = " ".join(captions)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ringside-drawing sheet" viewBox="0 0 {number(width)} '
        f'{number(height)}" width="{number(width)}" height="{number(height)}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(words)}</desc><style>{read_asset('schedule/drawing_svg.css')}</style>"
        f'<text class="title" x="12" y="24">{escape(title)}</text>{panels}{more}</svg>'
    )


def scene(frame: Frame, layout: GraphLayout) -> str:
    """Return everything in a picture: outlines, rails, arrows, vertices, names of trees."""
    return (
        f'<g class="ground">{ground(layout)}</g><g class="arrows">{arrows(frame, layout)}</g>'
        f'<g class="nodes">{"".join(_node(frame, layout, i) for i in range(len(layout.nodes)))}</g>'
    )


def ground(layout: GraphLayout) -> str:
    """Return what lies under everything and never changes."""
    rooms = "".join(
        f'<path class="room" d="{room.outline}"/><text class="note" x="{number(room.at[0])}" y="{number(room.at[1])}">'
        f"{room.name}</text>"
        for room in layout.rooms
    )
    rails = "".join(
        f'<path class="rail{_tree(layout, layout.nodes[a].stripe)}" d="M{_point(p)}L{_point(q)}"/>'
        for a, b in layout.rails
        for p, q in [layout.rail(a, b)]
    )
    notes = "".join(
        f'<text class="note{_tree(layout, stripe)}" x="{number(x)}" y="{number(y)}">{text}</text>'
        for text, (x, y), stripe in layout.notes
    )
    return rooms + rails + notes


def _tree(layout: GraphLayout, stripe: int) -> str:
    return f" tree{stripe}" if layout.stripes > 1 else ""


# ---- vertices


def _node(frame: Frame, layout: GraphLayout, index: int) -> str:
    node, sizes = layout.nodes[index], layout.sizes
    schedule = frame.story.schedule
    name = vertex_name(schedule, node.vertex)
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
            start, control, end = curve
            drawn.append(
                f'<g class="arrow {kind}{_tree(layout, stripe)}" data-src="{message.src}" data-dst="{message.dst}"'
                f'{colour}><path class="line" d="M{_point(start)}Q{_point(control)} {_point(end)}"/>'
                f'<path class="head" d="{_head(control, end, 1 if look == "full" else 0.7)}"/>{label}</g>'
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
        spot = pills.place(curve, 0.3, 7 * len(text), 12)
        mini = f'<text class="mini">{text}</text>'
        return f'<g class="pill" transform="translate({_point(spot)})">{mini}</g>' if spot else ""
    text = f"{'+' if reducing else '='} {text}"
    wide = 7 * len(text) + 12
    spot = pills.place(curve, offset, wide, 19) or on_curve(curve, offset)
    return (
        f'<g class="pill" transform="translate({_point(spot)})">'
        f'<rect x="{number(-wide / 2)}" y="-9.5" width="{wide}" height="19" rx="8"/><text>{text}</text></g>'
    )


def _head(control: Point, end: Point, scale: float) -> str:
    along = np.array(end) - np.array(control)
    along /= np.hypot(*along)
    across = np.array([-along[1], along[0]])
    back = np.array(end) - 9 * scale * along
    corners = (np.array(end) + 2 * along, back + 4.6 * scale * across, back - 4.6 * scale * across)
    return "M" + "L".join(_point((float(x), float(y))) for x, y in corners) + "Z"


def number(value: float) -> str:
    """Return a coordinate with at most one decimal."""
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _point(point: Point) -> str:
    return f"{number(point[0])} {number(point[1])}"

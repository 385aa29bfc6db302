"""Where the vertices of a picture go: on a circle, round a middle, along a line, as a tree or as two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ringside.view.schedule.frames import ScheduleFrames, ScheduleShape, Tree, shape_of
from ringside.view.schedule.layout import MOST_LABELS, GraphLayout, GraphNode, Point, Room, Sizes, middle

# From a disc to its cells.
NEAR = 9
# Inside the outline of a node that holds disc and cells.
PADDING = 7


def arrange_vertices(story: ScheduleFrames) -> GraphLayout:
    """Return the picture of a schedule with everything in its place."""
    shape = shape_of(story)
    if shape.kind == "line":
        return _arrange_line(story, shape)
    if shape.kind == "tree":
        return _arrange_trees(story, shape)
    return _arrange_circle(story, shape)


# ---- circle


def _arrange_circle(story: ScheduleFrames, shape: ScheduleShape) -> GraphLayout:
    sizes, s = Sizes.of(story), story.schedule
    slots = _angles(shape)
    boxed = [_centred(sizes, vertex, story.shown[vertex]) for vertex in shape.centre]
    least = 0.0 if len(shape.order) == 1 else 84.0 if len(shape.order) == 2 and not boxed else 112.0
    if boxed:
        inner = max(math.hypot(*corner) for node in boxed for corner in _box_corners(node))
        least = max(least, inner + 92)
    # The smallest circle, in steps of 4%, on which nothing touches.
    radius = least
    while radius and not _fits(story, sizes, shape, slots, radius):
        radius *= 1.04
    # What is in the middle stands side by side.
    widths = [2 * _box_corners(node)[-1][0] + 10 for node in boxed]
    starts = [sum(widths[:i]) - sum(widths) / 2 for i in range(len(boxed))]
    centre = [_moved(node, start + wide / 2, 0) for node, start, wide in zip(boxed, starts, widths, strict=True)]
    rim = [_on_rim(sizes, rank, story.shown[rank], angle, radius) for rank, angle in slots.items()]
    nodes = sorted([*rim, *centre], key=lambda node: node.vertex)
    rails: tuple[tuple[int, int], ...] = ()
    if shape.closed:
        rails = tuple(zip(shape.order, [*shape.order[1:], shape.order[0]], strict=True))
    elif len(shape.centre) == 1 and not shape.hosts:
        rails = tuple((shape.centre[0], rank) for rank in shape.order)
    layout = GraphLayout(
        sizes,
        tuple(nodes),
        (0,) * len(story.members),
        bend=0.24 if s.ranks == 2 and not shape.centre else 0.16,
        labels=s.ranks <= MOST_LABELS,
        # Arrows that cross the circle meet in its middle: their labels stay near their senders.
        label_at=0.36 if shape.closed or s.ranks == 2 else 0.3,
        alone_at=0.5 if shape.closed or shape.centre or s.ranks == 2 else 0.3,
        rails=rails,
    )
    return replace(layout, rooms=tuple(_host_outlines(layout, shape)))


def _angles(shape: ScheduleShape) -> dict[int, float]:
    """Return every rank's angle, clockwise from the right; the first rank, or host, is on top."""
    places = [(rank, float(i)) for i, rank in enumerate(shape.order)]
    total, first = float(len(shape.order)), 0.0
    if shape.hosts:
        host_of = {rank: i for i, host in enumerate(shape.hosts) for rank in host}
        places = [(rank, i + 1.2 * host_of[rank]) for rank, i in places]
        total, first = total + 1.2 * len(shape.hosts), (len(shape.hosts[0]) - 1) / 2
    quarter = math.pi if total == 2 else math.pi / 2
    return {rank: 2 * math.pi * (slot - first) / total - quarter for rank, slot in places}


def _fits(story: ScheduleFrames, sizes: Sizes, shape: ScheduleShape, slots: dict[int, float], radius: float) -> bool:
    """Whether no two cards overlap and discs are far enough from each other for an arrow between them."""
    nodes = [_on_rim(sizes, rank, story.shown[rank], angle, radius) for rank, angle in slots.items()]
    boxes = [(*node.card, *sizes.card(len(node.parts))) for node in nodes]
    apart = 10 if len(nodes) <= 16 else 5
    for i, (x, y, wide, high) in enumerate(boxes):
        for u, v, w, h in boxes[i + 1 :]:
            if x < u + w + apart and u < x + wide + apart and y < v + h + apart and v < y + high + apart:
                return False
    n = len(nodes)
    roomy = n <= 8 and not shape.hosts and not shape.centre
    least = sizes.disc * (6.4 if roomy else 5.6 if n <= 12 else 4 if n <= 16 else 2.6)
    return n < 2 or all(
        math.hypot(a.x - b.x, a.y - b.y) >= least for a, b in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    )


def _on_rim(sizes: Sizes, rank: int, parts: tuple[int, ...], angle: float, radius: float) -> GraphNode:
    """Place a rank on the circle, its cells outside of it."""
    x, y = math.cos(angle), math.sin(angle)
    wide, high = sizes.card(len(parts))
    # Far enough that all of the cells, corners included, lie beyond a tangent clear of the disc.
    away = radius + sizes.disc + NEAR + (abs(x) * wide + abs(y) * high) / 2
    return GraphNode(rank, parts, x * radius, y * radius, (x * away - wide / 2, y * away - high / 2))


def _centred(sizes: Sizes, vertex: int, parts: tuple[int, ...]) -> GraphNode:
    """Return a node with disc above and cells below, in a box round (0, 0)."""
    wide, high = sizes.card(len(parts))
    across = max(wide, 2 * sizes.disc) / 2 + PADDING
    down = (2 * sizes.disc + 2 + high) / 2 + PADDING
    top = -down + PADDING
    return GraphNode(
        vertex, parts, 0, top + sizes.disc, (-wide / 2, top + 2 * sizes.disc + 2), (-across, -down, across, down)
    )


def _box_corners(node: GraphNode) -> list[Point]:
    left, top, right, bottom = node.box or (0, 0, 0, 0)
    return [(x, y) for x in (left, right) for y in (top, bottom)]


def _moved(node: GraphNode, dx: float, dy: float) -> GraphNode:
    left, top, right, bottom = node.box or (node.x, node.y, node.x, node.y)
    card = (node.card[0] + dx, node.card[1] + dy)
    return replace(node, x=node.x + dx, y=node.y + dy, card=card, box=(left + dx, top + dy, right + dx, bottom + dy))


def _host_outlines(layout: GraphLayout, shape: ScheduleShape) -> list[Room]:
    """Outline every host: a piece of the ring that its ranks and their cells lie on."""
    rooms = []
    for number, host in enumerate(shape.hosts):
        corners = [corner for rank in host for corner in layout.corners(layout.nodes[layout.node(rank)])]
        ranks = [layout.nodes[layout.node(rank)] for rank in host]
        x, y = sum(node.x for node in ranks), sum(node.y for node in ranks)
        centre = math.atan2(y, x)
        turns = [math.remainder(math.atan2(v, u) - centre, 2 * math.pi) for u, v in corners]
        low, high = min(turns) - 0.025, max(turns) + 0.025
        outer = max(math.hypot(u, v) for u, v in corners) + 6
        inner = math.hypot(ranks[0].x, ranks[0].y) - layout.sizes.disc - 10
        # The outline: along the outer arc, and back along the inner one.
        count = max(2, math.ceil((high - low) / 0.05))
        arc = [centre + low + (high - low) * i / count for i in range(count + 1)]
        points = [_polar(outer, turn) for turn in arc] + [_polar(inner, turn) for turn in reversed(arc)]
        outline = tuple((round(x, 1), round(y, 1)) for x, y in points)
        beyond = _polar(outer + 14 + 22 * abs(math.cos(centre)), centre)
        rooms.append(Room(outline, f"host {number}", beyond))
    return rooms


def _polar(radius: float, angle: float) -> Point:
    return radius * math.cos(angle), radius * math.sin(angle)


# ---- line


def _arrange_line(story: ScheduleFrames, shape: ScheduleShape) -> GraphLayout:
    """Lay the ranks along a line, in rows that turn round at their ends."""
    sizes, n = Sizes.of(story), len(shape.order)
    columns = n if n <= 4 else math.ceil(math.sqrt(1.4 * n))
    nodes = [_centred(sizes, rank, story.shown[rank]) for rank in shape.order]
    across = max(_box_corners(node)[-1][0] for node in nodes) * 2 + 84
    down = max(_box_corners(node)[-1][1] for node in nodes) * 2 + 64
    placed = []
    for i, node in enumerate(nodes):
        row, column = divmod(i, columns)
        placed.append(_moved(node, across * (columns - 1 - column if row % 2 else column), down * row))
    rails = tuple((a, b) for a, b in zip(shape.order, shape.order[1:], strict=False))
    ordered = tuple(sorted(placed, key=lambda node: node.vertex))
    return GraphLayout(sizes, ordered, (0,) * len(story.members), bend=0.14, labels=n <= MOST_LABELS, rails=rails)


# ---- trees


def _arrange_trees(story: ScheduleFrames, shape: ScheduleShape) -> GraphLayout:
    """Draw a tree with its root on top; a second one below, upside down, so that the leaves of both meet."""
    sizes = Sizes.of(story, len(shape.trees))
    stripe_of = [0] * len(story.members)
    nodes: list[GraphNode] = []
    for stripe, tree in enumerate(shape.trees):
        for part in tree.parts:
            stripe_of[part] = stripe
        placed = _place_tree(sizes, tree, shape.order, alone=len(shape.trees) == 1)
        nodes += [replace(node, stripe=stripe) for node in placed]
    notes: tuple[tuple[str, Point, int], ...] = ()
    if len(shape.trees) == 2:
        nodes, notes = _turn_second(story, shape, nodes)
    layout = GraphLayout(
        sizes, tuple(nodes), tuple(stripe_of), bend=0.1, labels=len(shape.order) <= MOST_LABELS // 2, notes=notes
    )
    rails = tuple(
        (layout.node(child, stripe), layout.node(parent, stripe))
        for stripe, tree in enumerate(shape.trees)
        for child, parent in tree.parent.items()
    )
    return replace(layout, rails=rails)


def _beside(sizes: Sizes, vertex: int, parts: tuple[int, ...]) -> GraphNode:
    """Return a node with its cells right of the disc, in a box round (0, 0)."""
    wide, high = sizes.card(len(parts))
    across = (2 * sizes.disc + 5 + wide) / 2 + PADDING
    down = max(2 * sizes.disc, high + 4) / 2 + PADDING - 2
    disc = -across + PADDING + sizes.disc
    return GraphNode(vertex, parts, disc, 0, (disc + sizes.disc + 5, -high / 2 - 2), (-across, -down, across, down))


def _place_tree(sizes: Sizes, tree: Tree, ranks: Sequence[int], *, alone: bool) -> list[GraphNode]:
    column = tree.columns(ranks)
    boxes = {rank: (_centred if alone and len(ranks) <= 8 else _beside)(sizes, rank, tree.parts) for rank in ranks}
    depth = {rank: tree.depth(rank) for rank in ranks}
    wide, high = (2 * extent for extent in _box_corners(boxes[tree.root])[-1])
    # Neighbours in one level may be closer than two columns only where the tree is no in-order one.
    nearest = min(
        (abs(column[a] - column[b]) for a in ranks for b in ranks if a < b and depth[a] == depth[b]), default=1
    )
    pitch = max((wide + 14) / nearest, 40 if len(ranks) <= 16 else 24)
    level = high + (58 if len(ranks) <= 16 else 46)
    return [_moved(boxes[rank], pitch * column[rank], level * depth[rank]) for rank in ranks]


def _turn_second(
    story: ScheduleFrames, shape: ScheduleShape, nodes: Sequence[GraphNode]
) -> tuple[list[GraphNode], tuple[tuple[str, Point, int], ...]]:
    """Turn the second tree upside down and put it below the first."""
    first = [node for node in nodes if node.stripe == 0]
    second = [node for node in nodes if node.stripe == 1]
    foot = max(_bottom(node) for node in first)
    deepest = max(middle(node)[1] for node in second)
    half = _bottom(second[0]) - middle(second[0])[1]
    turned = []
    for node in second:
        y = middle(node)[1]
        turned.append(_moved(node, 0, foot + 62 + half + (deepest - y) - y))
    left = min(node.box[0] for node in [*first, *turned] if node.box)
    right = max(node.box[2] for node in [*first, *turned] if node.box)
    names = []
    for tree in shape.trees:
        chunks = story.chunks_of(tree.parts)
        names.append(f"c{chunks[0]}" if len(chunks) == 1 else f"c{chunks[0]} to c{chunks[-1]}")
    x = (left + right) / 2
    notes = ((f"↑ tree 1: {names[0]}", (x, foot + 20), 0), (f"↓ tree 2: {names[1]}", (x, foot + 42), 1))
    return [*first, *turned], notes


def _bottom(node: GraphNode) -> float:
    return node.box[3] if node.box else node.y

"""Where everything of a schedule's picture goes: vertices with their cells, and the arrows between them.

SVG user units, y pointing down. `drawing_arrange` decides where vertices go; this is what a placed picture is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ringside.view.schedule.frames import ScheduleFrames

Point = tuple[float, float]
Curve = tuple[Point, Point, Point]

# With more contributions in a chunk its strips would be thinner than a pixel: show how full it is instead.
MOST_STRIPS = 16
# With more ranks a label on every arrow would cover the others.
MOST_LABELS = 32


@dataclass(frozen=True)
class Sizes:
    """How large a vertex and its cells are drawn.

    Args:
        ranks: Number of ranks.
        cells: The most cells that a vertex has.
        strips: Whether a cell has one strip per contribution; otherwise it fills up.
    """

    ranks: int
    cells: int
    strips: bool

    disc: ClassVar[float] = 19
    """Radius of a rank's disc."""

    @classmethod
    def of(cls, story: ScheduleFrames, stripes: int = 1) -> Sizes:
        """Return the sizes for a schedule whose vertices have their cells in so many stripes."""
        cells = -(-max(map(len, story.shown), default=1) // stripes)
        several = int(story.holders.sum(axis=0).max(initial=1))
        return cls(story.schedule.ranks, cells, several == 1 or (several <= MOST_STRIPS and cells <= 64))

    @property
    def cell(self) -> float:
        """Width and height of a cell."""
        if self.cells > 36 and (self.ranks > 8 or not self.strips):
            return 7
        if self.cells > 16 or (self.ranks > MOST_STRIPS and self.cells > 4):
            return 16
        return 34 if self.ranks <= 4 and self.cells <= 8 else 28 if self.ranks <= 8 or self.cells <= 4 else 22

    @property
    def named(self) -> bool:
        """Whether every cell has its chunk's name above it."""
        return self.cell >= 22 and self.cells <= 8

    @property
    def lead(self) -> float:
        """Room for a name before each row of cells, where not each of them has one."""
        return 26 if self.cell >= 16 and not self.named else 0

    @property
    def pitch(self) -> Point:
        """From one cell to the next, across and down."""
        gap = 5 if self.named else 3 if self.cell > 9 else 1.5
        return self.cell + gap, self.cell + gap + (13 if self.named else 0)

    def columns(self, cells: int) -> int:
        """Cells beside each other: a row of up to three, a near-square of more."""
        if cells <= 3:
            return max(cells, 1)
        root = math.sqrt(cells)
        even = [c for c in range(math.ceil(root), int(2 * root) + 1) if cells % c == 0]
        return even[0] if even else math.ceil(root)

    def card(self, cells: int) -> Point:
        """Width and height of so many cells together."""
        across, down = self.pitch
        return self.lead + self.columns(cells) * across, -(-cells // self.columns(cells)) * down


@dataclass(frozen=True)
class GraphNode:
    """A vertex where it is drawn; in two trees a rank is drawn once in each.

    Args:
        vertex: The rank or switch.
        parts: The parts whose cells it has, in their order.
        x: Its disc's centre.
        y: Its disc's centre.
        card: The upper left corner of its cells.
        box: The rectangle (left, top, right, bottom) that arrows keep out of; None: only the disc.
        stripe: The tree that it belongs to.
    """

    vertex: int
    parts: tuple[int, ...]
    x: float
    y: float
    card: Point
    box: tuple[float, float, float, float] | None = None
    stripe: int = 0


@dataclass(frozen=True)
class Room:
    """A host's outline: its corners, its name and where that goes."""

    outline: tuple[Point, ...]
    name: str
    at: Point


@dataclass(frozen=True)
class GraphLayout:
    """A placed picture.

    Args:
        sizes: Of everything in it.
        nodes: The vertices.
        stripe_of: The tree of every part; all 0 but in a two-tree.
        bend: How much arrows bend to their left, as a share of their length, so that the two directions keep apart.
        labels: Whether arrows carry the names of what they move.
        label_at: Where on an arrow its label is if another comes the other way, as a share of its length.
        alone_at: Where it is if none does.
        rails: Pairs of indices of nodes whose link is drawn all the time.
        rooms: The hosts' outlines.
        notes: Words in the picture: text, where, and the tree whose colour they have.
    """

    sizes: Sizes
    nodes: tuple[GraphNode, ...]
    stripe_of: tuple[int, ...]
    bend: float = 0.16
    labels: bool = True
    label_at: float = 0.36
    alone_at: float = 0.5
    rails: tuple[tuple[int, int], ...] = ()
    rooms: tuple[Room, ...] = ()
    notes: tuple[tuple[str, Point, int], ...] = ()

    @property
    def stripes(self) -> int:
        """Number of trees, or 1."""
        return 1 + max((node.stripe for node in self.nodes), default=0)

    @cached_property
    def _index(self) -> dict[tuple[int, int], int]:
        return {(node.vertex, node.stripe): index for index, node in enumerate(self.nodes)}

    def node(self, vertex: int, stripe: int = 0) -> int:
        """Return the index of a vertex's node in a tree."""
        return self._index[vertex, stripe]

    @cached_property
    def box(self) -> tuple[float, float, float, float]:
        """The view box: x, y, width, height."""
        corners = [corner for node in self.nodes for corner in self.corners(node)]
        corners += [(x + dx, y + dy) for _, (x, y), _ in self.notes for dx in (-60, 60) for dy in (-8, 8)]
        corners += [corner for room in self.rooms for corner in room.outline]
        corners += [(x + dx, y + dy) for room in self.rooms for x, y in [room.at] for dx in (-28, 28) for dy in (-9, 9)]
        left, right = min(x for x, _ in corners) - 10, max(x for x, _ in corners) + 10
        top, bottom = min(y for _, y in corners) - 10, max(y for _, y in corners) + 10
        # Room for arrows that bow out, and nothing so small that it would be blown up.
        wide, high = max(right - left, 260), max(bottom - top, 150)
        return (left + right - wide) / 2, (top + bottom - high) / 2, wide, high

    def corners(self, node: GraphNode) -> list[Point]:
        """Return the corners of everything drawn of a node."""
        r, (x, y) = self.sizes.disc, node.card
        wide, high = self.sizes.card(len(node.parts)) if node.parts else (0, 0)
        rectangles = [(node.x - r, node.y - r, node.x + r, node.y + r), (x, y, x + wide, y + high)]
        return [(u, v) for a, b, c, d in [*rectangles, node.box or rectangles[0]] for u in (a, c) for v in (b, d)]

    def cell_at(self, index: int) -> Sequence[Point]:
        """Return the upper left corners of a node's cells, relative to its card."""
        across, down = self.sizes.pitch
        node = self.nodes[index]
        columns, gap = self.sizes.columns(len(node.parts)), across - self.sizes.cell
        return [
            (self.sizes.lead + i % columns * across + gap / 2, i // columns * down + down - self.sizes.cell - gap / 2)
            for i in range(len(node.parts))
        ]

    def curve(self, src: int, dst: int) -> Curve:
        """Return start, control point and end of the arrow from one node to another."""
        a, b = self.nodes[src], self.nodes[dst]
        (ax, ay), (bx, by) = middle(a), middle(b)
        length = math.hypot(bx - ax, by - ay) or 1
        bend = min(self.bend * length, 46)
        control = ((ax + bx) / 2 + bend * (by - ay) / length, (ay + by) / 2 - bend * (bx - ax) / length)
        return self._leave(a, control, 3), control, self._leave(b, control, 5)

    def rail(self, src: int, dst: int) -> tuple[Point, Point]:
        """Return the ends of the straight line between two nodes."""
        a, b = self.nodes[src], self.nodes[dst]
        return self._leave(a, middle(b), 2), self._leave(b, middle(a), 2)

    def _leave(self, node: GraphNode, towards: Point, gap: float) -> Point:
        """Return the point, a gap outside of a node, on the way from its middle to some point."""
        x, y = middle(node)
        dx, dy = towards[0] - x, towards[1] - y
        length = math.hypot(dx, dy) or 1
        reach = self.sizes.disc + gap
        if node.box:
            left, top, right, bottom = node.box
            across = (right - left) / 2 / abs(dx) if dx else math.inf
            down = (bottom - top) / 2 / abs(dy) if dy else math.inf
            reach = min(across, down) * length + gap
        return x + dx / length * reach, y + dy / length * reach


def middle(node: GraphNode) -> Point:
    """Return where a node's arrows point to."""
    if node.box is None:
        return node.x, node.y
    return (node.box[0] + node.box[2]) / 2, (node.box[1] + node.box[3]) / 2


def on_curve(curve: Curve, t: float) -> Point:
    """Return the point of a quadratic Bézier curve at 0 ≤ t ≤ 1."""
    (ax, ay), (cx, cy), (bx, by) = curve
    p, q, r = (1 - t) ** 2, 2 * t * (1 - t), t * t
    return p * ax + q * cx + r * bx, p * ay + q * cy + r * by


class Pills:
    """Where the labels of one round go: on their arrows, if they can without covering a disc or each other."""

    def __init__(self, layout: GraphLayout) -> None:
        r = layout.sizes.disc
        self._taken = [(node.x - r, node.y - r, node.x + r, node.y + r) for node in layout.nodes]

    def place(self, curve: Curve, offset: float, wide: float, high: float) -> Point | None:
        """Return where the middle of a label goes on an arrow, and take that place; None if there is no free one.

        Args:
            curve: The arrow.
            offset: Where it would rather be, as a share of the arrow's length.
            wide: Its width.
            high: Its height.
        """
        for t in (offset, *TRIED):
            x, y = on_curve(curve, t)
            left, top, right, bottom = x - wide / 2, y - high / 2, x + wide / 2, y + high / 2
            if not any(left < c and a < right and top < d and b < bottom for a, b, c, d in self._taken):
                self._taken.append((left, top, right, bottom))
                return x, y
        return None


# Where else a label may be, best first; drawing.js has the same.
TRIED = (0.3, 0.36, 0.24, 0.42, 0.48, 0.54, 0.6, 0.66, 0.18, 0.72)

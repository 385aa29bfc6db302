"""Where everything of a schedule's picture goes: ranks on a circle, their chunks outside it, arrows inside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

Point = tuple[float, float]

# With more ranks the parts of a chunk would be thinner than a pixel: show how full it is instead of who is in it.
MOST_STRIPS = 16
# With more ranks a label would be smaller than can be read.
MOST_LABELS = 32


@dataclass(frozen=True)
class Layout:
    """The geometry of a picture, in SVG user units around (0, 0), y pointing down.

    Args:
        ranks: Number of ranks on the circle; rank 0 on top, the others clockwise.
        chunks: Number of cells that every rank has.
    """

    ranks: int
    chunks: int

    @property
    def strips(self) -> bool:
        """Whether a cell has one strip per contributing rank."""
        return self.ranks <= MOST_STRIPS

    @property
    def labels(self) -> bool:
        """Whether arrows carry the chunk's name."""
        return self.ranks <= MOST_LABELS

    @property
    def disc(self) -> float:
        """Radius of a rank's disc."""
        return 19 if self.strips else 13

    @property
    def cell(self) -> float:
        """Width and height of a cell."""
        return 34 if self.ranks <= 4 else 28 if self.ranks <= 8 else 22 if self.strips else 8

    @property
    def pitch(self) -> Point:
        """From one cell to the next, across and down; a row has its labels above it."""
        gap = 4 if self.strips else 1.5
        return self.cell + gap, self.cell + gap + (12 if self.strips else 0)

    @property
    def columns(self) -> int:
        """Cells beside each other: a row of up to three, a near-square of more."""
        if self.chunks <= 3:
            return self.chunks
        root = math.sqrt(self.chunks)
        even = [c for c in range(math.ceil(root), int(2 * root) + 1) if self.chunks % c == 0]
        return even[0] if even else math.ceil(root)

    @property
    def card(self) -> Point:
        """Width and height of all cells of one rank together."""
        across, down = self.pitch
        rows = -(-self.chunks // self.columns)
        return self.columns * across, rows * down

    @cached_property
    def radius(self) -> float:
        """Radius of the circle on which the discs lie: the smallest at which nothing overlaps."""
        if self.ranks == 1:
            return 0
        radius = 84.0 if self.ranks == 2 else 112.0
        while self._crowded(radius):
            radius *= 1.04
        return radius

    def _crowded(self, radius: float) -> bool:
        cards = [self._card_centre(rank, radius) for rank in range(self.ranks)]
        wide, high = self.card[0] + 14, self.card[1] + 10
        for i, (x, y) in enumerate(cards):
            for u, v in cards[i + 1 :]:
                if abs(x - u) < wide and abs(y - v) < high:
                    return True
        chord = 2 * radius * math.sin(math.pi / self.ranks)
        return chord < self.disc * (6.4 if self.ranks <= 8 else 3.4 if self.strips else 2.4)

    def _direction(self, rank: int) -> Point:
        angle = 2 * math.pi * rank / self.ranks - (math.pi if self.ranks == 2 else math.pi / 2)
        return math.cos(angle), math.sin(angle)

    def _card_centre(self, rank: int, radius: float) -> Point:
        x, y = self._direction(rank)
        wide, high = self.card[0] / 2, self.card[1] / 2
        # Far enough that the whole card, corners included, lies beyond a tangent clear of the disc.
        support = abs(x) * wide + abs(y) * high
        away = radius + self.disc + 9 + support
        return x * away, y * away

    def disc_at(self, rank: int) -> Point:
        """Return the centre of a rank's disc."""
        x, y = self._direction(rank)
        return x * self.radius, y * self.radius

    def cell_at(self, rank: int, chunk: int) -> Point:
        """Return the upper left corner of a rank's cell."""
        x, y = self._card_centre(rank, self.radius)
        across, down = self.pitch
        row, column = divmod(chunk, self.columns)
        gap = across - self.cell
        return (
            x - self.card[0] / 2 + column * across + gap / 2,
            y - self.card[1] / 2 + row * down + down - self.cell - gap / 2,
        )

    @property
    def box(self) -> tuple[float, float, float, float]:
        """The view box: x, y, width, height."""
        centres = [self._card_centre(rank, self.radius) for rank in range(self.ranks)]
        x = max(abs(x) for x, _ in centres) + self.card[0] / 2 + 8
        y = [y for _, y in centres]
        top, bottom = min(y) - self.card[1] / 2 - 8, max(y) + self.card[1] / 2 + 8
        if self.ranks <= 2:
            top, bottom = min(top, -60), max(bottom, 60)
        return -x, top, 2 * x, bottom - top

    def curve(self, src: int, dst: int) -> tuple[Point, Point, Point]:
        """Return start, control point and end of the arrow from one rank to another.

        Arrows bend to their left, so that the two directions between a pair of ranks keep apart.
        """
        (ax, ay), (bx, by) = self.disc_at(src), self.disc_at(dst)
        length = math.hypot(bx - ax, by - ay) or 1
        bend = min(0.16 * length, 46) * (1.5 if self.ranks == 2 else 1)
        control = ((ax + bx) / 2 + bend * (by - ay) / length, (ay + by) / 2 - bend * (bx - ax) / length)
        return _towards((ax, ay), control, self.disc + 3), control, _towards((bx, by), control, self.disc + 5)


def _towards(start: Point, end: Point, distance: float) -> Point:
    length = math.hypot(end[0] - start[0], end[1] - start[1]) or 1
    share = distance / length
    return start[0] + (end[0] - start[0]) * share, start[1] + (end[1] - start[1]) * share


def on_curve(curve: tuple[Point, Point, Point], t: float) -> Point:
    """Return the point of a quadratic Bézier curve at 0 ≤ t ≤ 1."""
    (ax, ay), (cx, cy), (bx, by) = curve
    p, q, r = (1 - t) ** 2, 2 * t * (1 - t), t * t
    return p * ax + q * cx + r * bx, p * ay + q * cy + r * by


def rank_colour(rank: int, ranks: int) -> str:
    """Return a rank's colour as #rrggbb: hues evenly around the OKLCH circle, neighbours a little lighter or darker."""
    hue = math.radians(262 + 360 * rank / max(ranks, 3))
    lightness = 0.66 + (0.07 if rank % 2 else -0.03)
    return _oklch(lightness, 0.135, hue)


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """B. Ottosson's OKLab in polar form, to sRGB."""
    a, b = chroma * math.cos(hue), chroma * math.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    red = 4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short
    green = -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short
    blue = -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short
    return "#" + "".join(f"{_gamma(channel):02x}" for channel in (red, green, blue))


def _gamma(linear: float) -> int:
    linear = min(max(linear, 0.0), 1.0)
    encoded = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return round(255 * encoded)

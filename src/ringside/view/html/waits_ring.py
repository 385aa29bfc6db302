"""The report's picture of the ring: who waited for whom."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ringside.monitor.stats import Floats, usable
from ringside.text import duration
from ringside.view.html.markup import NOTHING, Markup, fill

MOST_NAMES = 32
RADIUS = 150.0
CENTRE = 210.0


Wait = tuple[int, int, float]
"""Rank that waited, rank that it waited for, mean seconds per step."""


def longest_waits(own: Floats, waits: Floats, most: int) -> list[Wait]:
    """Return who waited longest for whom, the longest first: at most so many, of at least 2 % of the longest.

    Everybody waits for whoever arrives last, which is the rank with the longest own time of that step.

    Args:
        own: Own times in seconds, [steps, ranks]; NaN = missing.
        waits: Waiting times in seconds, [steps, ranks]; NaN = missing.
        most: How many to return.
    """
    own, waits = usable(own), np.where(np.isfinite(waits) & (waits > 0), waits, 0.0)
    known = ~np.isnan(own).all(axis=1)
    if not known.any():
        return []
    last = np.argmax(np.where(np.isnan(own), -np.inf, own), axis=1)
    awaited = np.unique(last[known])  # no more than steps: [ranks, ranks] would not fit into memory
    seconds = np.stack([waits[known & (last == rank)].sum(axis=0) for rank in awaited], axis=1) / known.sum()
    seconds[awaited, np.arange(len(awaited))] = 0.0
    least = 0.02 * float(seconds.max())
    order = np.argsort(seconds, axis=None)[::-1][:most]
    pairs = (divmod(int(index), len(awaited)) for index in order)
    return [
        (rank, int(awaited[column]), float(seconds[rank, column]))
        for rank, column in pairs
        if seconds[rank, column] > least
    ]


def waits_ring(arrows: Sequence[Wait], ranks: int, culprits: set[int]) -> Markup:
    """Return a `<figure>`: ranks on a ring, arrows from who waited to whom they waited for.

    Args:
        arrows: What to draw, the longest first.
        ranks: Number of ranks.
        culprits: Ranks named by a verdict; marked by a double outline and the word, not by colour alone.
    """
    most = max((seconds for _, _, seconds in arrows), default=0.0)
    texts = [f"rank {a} waited {duration(seconds)} per step for rank {b}" for a, b, seconds in arrows]
    items = [
        fill(
            "<li{}><b>{} → {}</b> {} per step</li>",
            Markup(' class="culprit"') if awaited in culprits else NOTHING,
            waiting,
            awaited,
            duration(seconds),
        )
        for waiting, awaited, seconds in arrows[:6]
    ]
    return fill(
        """<figure class="ring"><figcaption>Who waited for whom</figcaption><div class="ringbox">
<svg viewBox="0 0 420 420" role="img" aria-label="{label}">
<defs><marker id="tip" viewBox="0 0 8 8" refX="5" refY="4" markerUnits="userSpaceOnUse" markerWidth="14"
 markerHeight="14" orient="auto"><path d="M0 .6 7.4 4 0 7.4z" class="head"/></marker><marker id="tipc"
 viewBox="0 0 8 8" refX="5" refY="4" markerUnits="userSpaceOnUse" markerWidth="22" markerHeight="22"
 orient="auto"><path d="M0 .6 7.4 4 0 7.4z" class="head culprit"/></marker></defs>
<circle class="track" cx="{centre}" cy="{centre}" r="{radius}"/>{arrows}{nodes}</svg>
<div><p class="note">An arrow points from a rank that waited to the rank it waited for; its width is the time per
step.</p><ol class="waits">{items}</ol></div></div></figure>""",
        label="; ".join(texts[:8]) or "nobody waited for anybody",
        centre=CENTRE,
        radius=RADIUS,
        # The longest is drawn last, over the others.
        arrows=[
            _arrow(*arrow, ranks, most, arrow[1] in culprits, text)
            for arrow, text in reversed(list(zip(arrows, texts, strict=True)))
        ],
        nodes=[_node(rank, ranks, rank in culprits) for rank in range(ranks)],
        items=items or Markup("<li>Nobody waited.</li>"),
    )


def _arrow(waiting: int, awaited: int, seconds: float, ranks: int, most: float, culprit: bool, label: str) -> Markup:
    """A curve between two nodes, bent towards the centre, that ends at the outline of the awaited one."""
    (x0, y0), (x1, y1) = _place(waiting, ranks), _place(awaited, ranks)
    bend = 0.30 if ranks > 2 else 0.0
    # Moved sideways as well, so that two ranks that wait for each other have two arrows.
    offset = 26.0
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    nx, ny = (y1 - y0) / length, (x0 - x1) / length
    mx, my = (x0 + x1) / 2, (y0 + y1) / 2
    cx, cy = mx + bend * (CENTRE - mx) + offset * nx, my + bend * (CENTRE - my) + offset * ny
    start = _towards(x0, y0, cx, cy, _node_size(ranks) + 3)
    end = _towards(x1, y1, cx, cy, _node_size(ranks) + (14 if culprit else 9))
    return fill(
        '<path class="{kind}" d="M{ax:.1f} {ay:.1f}Q{cx:.1f} {cy:.1f} {bx:.1f} {by:.1f}"'
        ' stroke-width="{width:.1f}" marker-end="url(#{tip})"><title>{label}</title></path>',
        kind="wait culprit" if culprit else "wait",
        ax=start[0],
        ay=start[1],
        cx=cx,
        cy=cy,
        bx=end[0],
        by=end[1],
        width=1.0 + (5.0 if ranks <= MOST_NAMES else 2.0) * seconds / most,
        tip="tipc" if culprit else "tip",
        label=label,
    )


def _node(rank: int, ranks: int, culprit: bool) -> Markup:
    (x, y), size = _place(rank, ranks), _node_size(ranks)
    named = ranks <= MOST_NAMES
    name = fill('<text x="{:.1f}" y="{:.1f}">{}</text>', x, y, rank) if named else NOTHING
    halo = word = NOTHING
    if culprit:
        halo = fill('<circle class="halo" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"/>', x, y, size + 5)
        outside = _towards(x, y, CENTRE, CENTRE, -(size + 20))
        label = "slow" if named else f"rank {rank}"
        word = fill('<text class="word" x="{:.1f}" y="{:.1f}">{}</text>', *outside, label)
    return fill(
        '{halo}<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size:.1f}"/>{name}{word}',
        halo=halo,
        kind="node culprit" if culprit else "node",
        x=x,
        y=y,
        size=size,
        name=name,
        word=word,
    )


def _place(rank: int, ranks: int) -> tuple[float, float]:
    angle = 2 * math.pi * rank / max(ranks, 1) - math.pi / 2
    return CENTRE + RADIUS * math.cos(angle), CENTRE + RADIUS * math.sin(angle)


def _node_size(ranks: int) -> float:
    """The radius of a node: many stand beside one another without touching."""
    return min(22.0, 0.42 * 2 * math.pi * RADIUS / max(ranks, 1))


def _towards(x: float, y: float, to_x: float, to_y: float, distance: float) -> tuple[float, float]:
    length = math.hypot(to_x - x, to_y - y) or 1.0
    return x + (to_x - x) * distance / length, y + (to_y - y) * distance / length

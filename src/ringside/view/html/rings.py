"""Ranks on a circle: who waited for whom, and a communicator's rings and trees by what every hop travels over."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

import numpy as np

from ringside.doctor.findings import EvidenceHop, Rings
from ringside.monitor.stats import Floats, usable
from ringside.text import duration, name_ranks
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.html.page import note_line

CENTRE = 210.0
"""Of both pictures, across and down, in their own coordinates."""

_Point = tuple[float, float]


def _on_circle(index: float, total: int, radius: float) -> _Point:
    """The place of a node, clockwise from the top."""
    angle = 2 * math.pi * index / max(total, 1) - math.pi / 2
    return CENTRE + radius * math.cos(angle), CENTRE + radius * math.sin(angle)


# -------------------------------------------------------------------------------------------------
# The report's picture: who waited for whom.

MOST_NAMES = 32
RADIUS = 150.0

Wait = tuple[int, int, float]
"""Rank that waited, rank that it waited for, mean seconds per step."""


def longest_waits(own: Floats, waits: Floats, most: int) -> list[Wait]:
    """Return who waited longest for whom, the longest first: at most so many, of at least 2% of the longest.

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


def waits_ring(arrows: Sequence[Wait], ranks: int, culprits: set[int], window: str = "whole run") -> Markup:
    """Return a `<figure>`: ranks on a ring, arrows from who waited to whom they waited for.

    Args:
        arrows: What to draw, the longest first.
        ranks: Number of ranks.
        culprits: Ranks named by a verdict; marked by a double outline and the word, not by colour alone.
        window: Which steps the means are over.
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
step: mean, {window}.</p><ol class="waits">{items}</ol></div></div></figure>""",
        label="; ".join(texts[:8]) or "no rank waited",
        centre=CENTRE,
        radius=RADIUS,
        # The longest is drawn last, over the others.
        arrows=[
            _arrow(*arrow, ranks, most, arrow[1] in culprits, text)
            for arrow, text in reversed(list(zip(arrows, texts, strict=True)))
        ],
        nodes=[_node(rank, ranks, rank in culprits) for rank in range(ranks)],
        items=items or Markup("<li>No rank waited.</li>"),
        window=window,
    )


def _arrow(waiting: int, awaited: int, seconds: float, ranks: int, most: float, culprit: bool, label: str) -> Markup:
    """A curve between two nodes, bent towards the centre, that ends at the outline of the awaited one."""
    (x0, y0), (x1, y1) = (_on_circle(rank, ranks, RADIUS) for rank in (waiting, awaited))
    bend = 0.30  # of the way; of two ranks the centre lies between them anyway
    # Moved sideways as well, so that two ranks that wait for each other have two arrows.
    offset = 26.0
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    nx, ny = (y1 - y0) / length, (x0 - x1) / length
    mx, my = (x0 + x1) / 2, (y0 + y1) / 2
    cx, cy = mx + bend * (CENTRE - mx) + offset * nx, my + bend * (CENTRE - my) + offset * ny
    ax, ay = _towards(x0, y0, cx, cy, _node_size(ranks) + 3)
    bx, by = _towards(x1, y1, cx, cy, _node_size(ranks) + (14 if culprit else 9))
    return fill(
        '<path class="{kind}" d="{path}" stroke-width="{width:.1f}" marker-end="url(#{tip})">'
        "<title>{label}</title></path>",
        kind="wait culprit" if culprit else "wait",
        path=f"M{ax:.1f} {ay:.1f}Q{cx:.1f} {cy:.1f} {bx:.1f} {by:.1f}",
        width=1.0 + (5.0 if ranks <= MOST_NAMES else 2.0) * seconds / most,
        tip="tipc" if culprit else "tip",
        label=label,
    )


def _node(rank: int, ranks: int, culprit: bool) -> Markup:
    (x, y), size = _on_circle(rank, ranks, RADIUS), _node_size(ranks)
    named = ranks <= MOST_NAMES
    name = fill('<text x="{:.1f}" y="{:.1f}">{}</text>', x, y, rank) if named else NOTHING
    halo = word = NOTHING
    if culprit:
        halo = fill('<circle class="halo" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"/>', x, y, size + 5)
        outside = _towards(x, y, CENTRE, CENTRE, -(size + 20))
        label = "slow" if named else f"rank {rank}"
        word = fill('<text class="word" x="{:.1f}" y="{:.1f}">{}</text>', *outside, label)
    kind = "node culprit" if culprit else "node"
    circle = fill('<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"/>', kind, x, y, size)
    return fill("{}{}{}{}", halo, circle, name, word)


def _node_size(ranks: int) -> float:
    """The radius of a node: many stand beside one another without touching."""
    return min(22.0, 0.42 * 2 * math.pi * RADIUS / max(ranks, 1))


def _towards(x: float, y: float, to_x: float, to_y: float, distance: float) -> tuple[float, float]:
    length = math.hypot(to_x - x, to_y - y) or 1.0
    return x + (to_x - x) * distance / length, y + (to_y - y) * distance / length


# -------------------------------------------------------------------------------------------------
# The doctor's picture: a communicator's rings, hosts as arcs around them; its trees by depth.

MOST_HOST_NAMES = 40
HOPS_RADIUS = 132.0
HOST_COLOURS = 8
_STYLES = (("NVLink", "nvlink"), ("P2P", "nvlink"), ("PCIe", "pcie"), ("SHM", "shm"), ("NET/Socket", "socket"))


def rings_figure(rings: Rings, culprits: set[int]) -> Markup:
    """Return a `<figure>` with the rings and trees of a communicator's first channels."""
    drawn = [_draw_ring(rings, channels, hops, culprits) for channels, hops in _group_alike(rings.rings)]
    drawn += [_draw_tree(channels, hops, culprits) for channels, hops in _group_alike(rings.trees)]
    if not drawn:
        return NOTHING
    vias = sorted({hop.via for hops in [*rings.rings.values(), *rings.trees.values()] for hop in hops if hop.via})
    legend = [fill('<span class="key"><i class="{}"></i>{}</span>', transport_class(via), via) for via in vias]
    if any(hop.wrong == "never connected" for hops in rings.rings.values() for hop in hops):
        legend.append(Markup('<span class="key"><i class="broken"></i>never connected</span>'))
    if any(crossed > needed for crossed, needed in (_crossings(rings, hops) for hops in rings.rings.values())):
        legend.append(Markup('<span class="key"><i class="crossing"></i>crosses between hosts (and a stroke)</span>'))
    return fill(
        """<figure class="topology"><figcaption>{title}</figcaption>{note}
<p class="legend">{legend}</p><div class="drawings">{drawn}</div></figure>""",
        title=rings.title,
        note=note_line(rings.note),
        legend=legend,
        drawn=drawn,
    )


def transport_class(via: str) -> str:
    """Return the CSS class of a transport."""
    if "GDRDMA" in via:
        return "rdma"
    return next((name for start, name in _STYLES if via.startswith(start)), "net" if via.startswith("NET") else "other")


def _group_alike(drawings: dict[int, list[EvidenceHop]]) -> list[tuple[str, Sequence[EvidenceHop]]]:
    """Each different drawing once, with the channels that have it: `channels 0 and 1`."""
    found: dict[tuple[EvidenceHop, ...], list[int]] = defaultdict(list)
    for channel, hops in drawings.items():
        if hops:
            found[tuple(hops)].append(channel)
    return [(name_ranks(channels, "channel"), hops) for hops, channels in found.items()]


def _crossings(rings: Rings, hops: Sequence[EvidenceHop]) -> tuple[int, int]:
    """How often a ring crosses between hosts, and how often it would have to: once per host."""
    hosts = {rings.hosts[rank] for hop in hops for rank in (hop.src, hop.dst) if rank < len(rings.hosts)}
    return sum(hop.between_hosts for hop in hops), len(hosts - {""})


def _draw_ring(rings: Rings, channels: str, hops: Sequence[EvidenceHop], culprits: set[int]) -> Markup:
    order = [hop.src for hop in hops]
    if hops[-1].dst != order[0]:  # broken open: the last hop does not lead back
        order.append(hops[-1].dst)
    place = {rank: _on_circle(index, len(order), HOPS_RADIUS) for index, rank in enumerate(order)}
    radius = _node_radius(len(order))
    # Two ranks send both ways over one line: bend it apart.
    bend = 26.0 if len(hops) <= 2 else 0.0

    # Arcs around the ring, one per run of neighbours on one host, with the host's name where there is room.
    hosts = [rings.hosts[rank] if rank < len(rings.hosts) else "" for rank in order]
    colours = {host: index % HOST_COLOURS for index, host in enumerate(dict.fromkeys(hosts)) if host}
    arcs, first, total = [], 0, len(order)
    half, outside = 0.36 if total > 1 else 0.5, HOPS_RADIUS + 34
    for host, run in groupby(hosts):
        count = len(list(run))
        (x0, y0), (x1, y1) = (_on_circle(edge, total, outside) for edge in (first - half, first + count - 1 + half))
        large = int((count - 1 + 2 * half) / total > 0.5)  # SVG's flag: more than half of the circle
        name, (x, y) = NOTHING, _on_circle(first + (count - 1) / 2, total, HOPS_RADIUS + 50)
        if total <= MOST_HOST_NAMES or count > 2:
            anchor = "start" if x > CENTRE + 40 else "end" if x < CENTRE - 40 else "middle"
            short = host if len(host) <= 14 else f"{host[:6]}…{host[-6:]}"
            name = fill('<text class="host" x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>', x, y, anchor, short)
        if host:
            path = f"M{x0:.1f} {y0:.1f}A{outside:.0f} {outside:.0f} 0 {large} 1 {x1:.1f} {y1:.1f}"
            template = '<path class="hostarc s{}" d="{}"><title>{}</title></path>{}'
            arcs.append(fill(template, colours[host], path, host, name))
        first += count

    # More crossings than hosts are the finding: red, and a stroke across the ring, so that they show without colour.
    crossed, needed = _crossings(rings, hops)
    over = f", {crossed} hops between hosts" if crossed else ""
    marks: list[Markup] = []
    if crossed > needed:
        over += f" where {needed} would do"
        for index, hop in enumerate(hops):
            if hop.between_hosts:
                (x0, y0), (x1, y1) = (_on_circle(index + 0.5, total, HOPS_RADIUS + end) for end in (-16, 22))
                marks.append(fill('<path class="crossing mark" d="M{:.1f} {:.1f}L{:.1f} {:.1f}"/>', x0, y0, x1, y1))
    return fill(
        """<div><svg viewBox="-50 0 520 420" role="img" aria-label="{channels}: {order}{over}">
{arcs}{hops}{marks}{nodes}</svg><p>ring of {channels}{over}</p></div>""",
        channels=channels,
        order=" → ".join(map(str, [*order[:64], order[0]])),
        over=over,
        arcs=arcs,
        hops=[
            _draw_hop(hop, place[hop.src], place[hop.dst], radius, bend, crossing=hop.between_hosts and bool(marks))
            for hop in hops
        ],
        marks=marks,
        nodes=[_draw_node(rank, place[rank], radius, rank in culprits) for rank in order],
    )


def _draw_tree(channels: str, hops: Sequence[EvidenceHop], culprits: set[int]) -> Markup:
    parent = {hop.src: hop.dst for hop in hops}
    depth = {}
    for member in {*parent, *parent.values()}:
        rank, steps = member, 0
        while rank in parent and steps <= len(parent):  # files may hold a circle
            rank, steps = parent[rank], steps + 1
        depth[member] = steps
    deepest = max(depth.values())
    place = {}
    for level, members in groupby(sorted(depth, key=lambda rank: (depth[rank], rank)), key=lambda rank: depth[rank]):
        row = list(members)
        for index, rank in enumerate(row):
            place[rank] = (420 * (index + 0.5) / len(row), 40 + 340 * level / max(deepest, 1))
    radius = _node_radius(max(len(place), 8))
    return fill(
        '<div><svg viewBox="-50 0 520 420" role="img" aria-label="{label}">{hops}{nodes}</svg><p>{label}</p></div>',
        label=f"tree of {channels}, {deepest + 1} levels",
        hops=[_draw_hop(hop, place[hop.src], place[hop.dst], radius, 0.0) for hop in hops],
        nodes=[_draw_node(rank, place[rank], radius, rank in culprits) for rank in sorted(place)],
    )


def _draw_hop(
    hop: EvidenceHop, start: _Point, end: _Point, radius: float, bend: float, *, crossing: bool = False
) -> Markup:
    """An arrow from the edge of one node to just before the next, `bend` to its side in the middle."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    ax, ay, bx, by = x0 + ux * radius, y0 + uy * radius, x1 - ux * (radius + 5), y1 - uy * (radius + 5)
    tip = f"M{bx - 7 * ux + 3.6 * uy:.1f} {by - 7 * uy - 3.6 * ux:.1f}L{bx + 3 * ux:.1f} {by + 3 * uy:.1f}"
    tip += f"L{bx - 7 * ux - 3.6 * uy:.1f} {by - 7 * uy + 3.6 * ux:.1f}"
    via, wrong = f" via {hop.via}" if hop.via else "", f", {hop.wrong}" if hop.wrong else ""
    mx, my = (ax + bx) / 2 - uy * bend, (ay + by) / 2 + ux * bend
    kind = "broken" if hop.wrong == "never connected" else "crossing" if crossing else transport_class(hop.via)
    return fill(
        '<path class="hop {kind}{between}" d="{path}"><title>{label}</title></path>'
        '<path class="hop tip {kind}" d="{tip}"/>',
        kind=kind,
        between=" between" if hop.between_hosts else "",
        path=f"M{ax:.1f} {ay:.1f}Q{mx:.1f} {my:.1f} {bx:.1f} {by:.1f}",
        label=f"{hop.src} → {hop.dst}{via}{wrong}",
        tip=tip,
    )


def _draw_node(rank: int, place: _Point, radius: float, culprit: bool) -> Markup:
    kind = "node culprit" if culprit else "node"
    circle = '<circle class="{}" cx="{:.1f}" cy="{:.1f}" r="{:.1f}"><title>rank {}</title></circle>{}'
    name = fill('<text x="{:.1f}" y="{:.1f}">{}</text>', *place, rank) if radius > 7 else NOTHING
    return fill(circle, kind, *place, radius, rank, name)


def _node_radius(total: int) -> float:
    return min(17.0, 0.34 * 2 * math.pi * HOPS_RADIUS / max(total, 1))

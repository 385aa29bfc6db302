"""Communicators drawn: ranks on a circle, hosts as arcs around, every hop by what it travels over; trees by depth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from ringside.doctor.findings import EvidenceHop, Rings
from ringside.text import name_ranks
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.html.page import note_line

CENTRE, RADIUS = 210.0, 132.0
MOST_NAMES = 40
HOST_COLOURS = 8
_STYLES = (("NVLink", "nvlink"), ("P2P", "nvlink"), ("PCIe", "pcie"), ("SHM", "shm"), ("NET/Socket", "socket"))
_Point = tuple[float, float]


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


def _group_alike(drawings: dict[int, list[EvidenceHop]]) -> list[tuple[str, list[EvidenceHop]]]:
    """Each different drawing once, with the channels that have it: `channels 0 and 1`."""
    found: list[tuple[list[int], list[EvidenceHop]]] = []
    for channel, hops in drawings.items():
        same = next((channels for channels, known in found if known == hops), None)
        if same is not None:
            same.append(channel)
        elif hops:
            found.append(([channel], hops))
    return [(name_ranks(channels, "channel"), hops) for channels, hops in found]


def _draw_ring(rings: Rings, channels: str, hops: Sequence[EvidenceHop], culprits: set[int]) -> Markup:
    order = [hop.src for hop in hops]
    if hops[-1].dst != order[0]:  # broken open: the last hop does not lead back
        order.append(hops[-1].dst)
    place = {rank: _on_circle(index, len(order), RADIUS) for index, rank in enumerate(order)}
    radius = _node_radius(len(order))
    # Two ranks send both ways over one line: bend it apart.
    bend = 26.0 if len(hops) <= 2 else 0.0

    # Arcs around the ring, one per run of neighbours on one host, with the host's name.
    hosts = [rings.hosts[rank] if rank < len(rings.hosts) else "" for rank in order]
    colours = {host: index % HOST_COLOURS for index, host in enumerate(dict.fromkeys(hosts)) if host}
    arcs, first = [], 0
    for host, run in groupby(hosts):
        count = len(list(run))
        if host:
            arcs.append(_host_arc(host, first, count, len(order), colours[host]))
        first += count

    crossings = sum(hop.between_hosts for hop in hops)
    over = f", {crossings} hops between hosts" if crossings else ""
    return fill(
        """<div><svg viewBox="-50 0 520 420" role="img" aria-label="{channels}: {order}{over}">
{arcs}{hops}{nodes}</svg><p>ring of {channels}{over}</p></div>""",
        channels=channels,
        order=" → ".join(map(str, [*order[:64], order[0]])),
        over=over,
        arcs=arcs,
        hops=[_draw_hop(hop, place[hop.src], place[hop.dst], radius, bend) for hop in hops],
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


def _host_arc(host: str, first: int, count: int, total: int, colour: int) -> Markup:
    """An arc outside of the ring, around the nodes from `first` on, and its name where there is room."""
    half = 0.36 if total > 1 else 0.5
    arc_radius = RADIUS + 34
    start, end = (_on_circle(edge, total, arc_radius) for edge in (first - half, first + count - 1 + half))
    x, y = _on_circle(first + (count - 1) / 2, total, RADIUS + 50)
    name = NOTHING
    if total <= MOST_NAMES or count > 2:
        name = fill(
            '<text class="host" x="{:.0f}" y="{:.0f}" text-anchor="{}">{}</text>',
            x,
            y,
            "start" if x > CENTRE + 40 else "end" if x < CENTRE - 40 else "middle",
            host if len(host) <= 14 else f"{host[:6]}…{host[-6:]}",
        )
    return fill(
        '<path class="hostarc s{colour}" d="M{x0:.1f} {y0:.1f}'
        'A{radius:.0f} {radius:.0f} 0 {large} 1 {x1:.1f} {y1:.1f}">'
        "<title>{host}</title></path>{name}",
        colour=colour,
        x0=start[0],
        y0=start[1],
        radius=arc_radius,
        large=int((count - 1 + 2 * half) / total > 0.5),  # SVG's flag: more than half of the circle
        x1=end[0],
        y1=end[1],
        host=host,
        name=name,
    )


def _draw_hop(hop: EvidenceHop, start: _Point, end: _Point, radius: float, bend: float) -> Markup:
    """An arrow from the edge of one node to just before the next, `bend` to its side in the middle."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    ax, ay, bx, by = x0 + ux * radius, y0 + uy * radius, x1 - ux * (radius + 5), y1 - uy * (radius + 5)
    tip = f"M{bx - 7 * ux + 3.6 * uy:.1f} {by - 7 * uy - 3.6 * ux:.1f}L{bx + 3 * ux:.1f} {by + 3 * uy:.1f}"
    tip += f"L{bx - 7 * ux - 3.6 * uy:.1f} {by - 7 * uy + 3.6 * ux:.1f}"
    via, wrong = f" via {hop.via}" if hop.via else "", f", {hop.wrong}" if hop.wrong else ""
    return fill(
        '<path class="hop {kind}{between}" d="M{ax:.1f} {ay:.1f}Q{mx:.1f} {my:.1f} {bx:.1f} {by:.1f}">'
        '<title>{label}</title></path><path class="hop tip {kind}" d="{tip}"/>',
        kind="broken" if hop.wrong == "never connected" else transport_class(hop.via),
        between=" between" if hop.between_hosts else "",
        ax=ax,
        ay=ay,
        mx=(ax + bx) / 2 - uy * bend,
        my=(ay + by) / 2 + ux * bend,
        bx=bx,
        by=by,
        label=f"{hop.src} → {hop.dst}{via}{wrong}",
        tip=tip,
    )


def _draw_node(rank: int, place: _Point, radius: float, culprit: bool) -> Markup:
    x, y = place
    return fill(
        '<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>rank {rank}</title></circle>{name}',
        kind="node culprit" if culprit else "node",
        x=x,
        y=y,
        radius=radius,
        rank=rank,
        name=fill('<text x="{:.1f}" y="{:.1f}">{}</text>', x, y, rank) if radius > 7 else NOTHING,
    )


def _on_circle(index: float, total: int, radius: float) -> _Point:
    """The place of a node, clockwise from the top."""
    angle = 2 * math.pi * index / max(total, 1) - math.pi / 2
    return CENTRE + radius * math.cos(angle), CENTRE + radius * math.sin(angle)


def _node_radius(total: int) -> float:
    return min(17.0, 0.34 * 2 * math.pi * RADIUS / max(total, 1))

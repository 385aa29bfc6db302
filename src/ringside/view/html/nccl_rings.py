"""Communicators drawn: ranks on a circle, hosts as arcs around, every hop by what it travels over; trees by depth."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import groupby

from ringside.doctor.findings import EvidenceHop, Rings
from ringside.monitor.verdict import name_ranks

CENTRE, RADIUS = 210.0, 132.0
MOST_NAMES = 40
HOST_COLOURS = 8
_STYLES = (("NVLink", "nvlink"), ("P2P", "nvlink"), ("PCIe", "pcie"), ("SHM", "shm"), ("NET/Socket", "socket"))


def rings_figure(rings: Rings, culprits: set[int]) -> str:
    """Return a `<figure>` with the rings and trees of a communicator's first channels."""
    drawn = [_ring(rings, channels, hops, culprits) for channels, hops in _alike(rings.rings)]
    drawn += [_tree(channels, hops, culprits) for channels, hops in _alike(rings.trees)]
    if not drawn:
        return ""
    vias = sorted({hop.via for hops in [*rings.rings.values(), *rings.trees.values()] for hop in hops if hop.via})
    wrong = any(hop.wrong == "never connected" for hops in rings.rings.values() for hop in hops)
    legend = "".join(f'<span class="key"><i class="{style(via)}"></i>{html.escape(via)}</span>' for via in vias)
    legend += '<span class="key"><i class="broken"></i>never connected</span>' if wrong else ""
    note = f'<p class="note">{html.escape(rings.note)}</p>' if rings.note else ""
    return f"""<figure class="topology"><figcaption>{html.escape(rings.title)}</figcaption>{note}
<p class="legend">{legend}</p><div class="drawings">{"".join(drawn)}</div></figure>"""


def style(via: str) -> str:
    """Return the CSS class of a transport."""
    if "GDRDMA" in via:
        return "rdma"
    return next((name for start, name in _STYLES if via.startswith(start)), "net" if via.startswith("NET") else "other")


def _alike(drawings: dict[int, list[EvidenceHop]]) -> list[tuple[str, list[EvidenceHop]]]:
    """Each different drawing once, with the channels that have it: `channels 0 and 1`."""
    found: list[tuple[list[int], list[EvidenceHop]]] = []
    for channel, hops in drawings.items():
        same = next((channels for channels, known in found if known == hops), None)
        if same is not None:
            same.append(channel)
        elif hops:
            found.append(([channel], hops))
    return [(name_ranks(channels).replace("rank", "channel"), hops) for channels, hops in found]


def _ring(rings: Rings, channels: str, hops: Sequence[EvidenceHop], culprits: set[int]) -> str:
    order = [hop.src for hop in hops]
    if hops[-1].dst != order[0]:
        order.append(hops[-1].dst)
    place = {rank: _on_circle(index, len(order), RADIUS) for index, rank in enumerate(order)}
    lines = "".join(_line(hop, place[hop.src], place[hop.dst], _radius(len(order)), _bend(hops)) for hop in hops)
    nodes = "".join(_node(rank, place[rank], _radius(len(order)), rank in culprits) for rank in order)
    crossings = sum(hop.between_hosts for hop in hops)
    said = f"{channels}: " + " → ".join(map(str, [*order[:64], order[0]]))
    over = f", {crossings} hops between hosts" if crossings else ""
    return f"""<div><svg viewBox="-50 0 520 420" role="img" aria-label="{html.escape(said + over)}">
{_hosts(rings, order)}{lines}{nodes}</svg><p>ring of {channels}{over}</p></div>"""


def _tree(channels: str, hops: Sequence[EvidenceHop], culprits: set[int]) -> str:
    parent = {hop.src: hop.dst for hop in hops}
    depth = {rank: _depth(rank, parent) for rank in {*parent, *parent.values()}}
    deepest = max(depth.values())
    place = {}
    for level, members in groupby(sorted(depth, key=lambda rank: (depth[rank], rank)), key=lambda rank: depth[rank]):
        row = list(members)
        for index, rank in enumerate(row):
            place[rank] = (420 * (index + 0.5) / len(row), 40 + 340 * level / max(deepest, 1))
    radius = _radius(max(len(place), 8))
    lines = "".join(_line(hop, place[hop.src], place[hop.dst], radius, 0.0) for hop in hops)
    nodes = "".join(_node(rank, place[rank], radius, rank in culprits) for rank in sorted(place))
    said = f"tree of {channels}, {deepest + 1} levels"
    return (
        f"""<div><svg viewBox="-50 0 520 420" role="img" aria-label="{said}">{lines}{nodes}</svg><p>{said}</p></div>"""
    )


def _depth(rank: int, parent: dict[int, int]) -> int:
    steps = 0
    while rank in parent and steps <= len(parent):
        rank, steps = parent[rank], steps + 1
    return steps


def _hosts(rings: Rings, order: Sequence[int]) -> str:
    """Arcs around the ring, one per run of neighbours on one host, with the host's name."""
    hosts = [rings.hosts[rank] if rank < len(rings.hosts) else "" for rank in order]
    colour = {host: index % HOST_COLOURS for index, host in enumerate(dict.fromkeys(hosts)) if host}
    arcs, at = [], 0
    for host, run in groupby(hosts):
        count = len(list(run))
        if host:
            arcs.append(_arc(host, at, count, len(order), colour[host]))
        at += count
    return "".join(arcs)


def _arc(host: str, at: int, count: int, total: int, colour: int) -> str:
    half = 0.36 if total > 1 else 0.5
    (x0, y0), (x1, y1) = (_on_circle(edge, total, RADIUS + 34) for edge in (at - half, at + count - 1 + half))
    large = int((count - 1 + 2 * half) / total > 0.5)
    x, y = _on_circle(at + (count - 1) / 2, total, RADIUS + 50)
    anchor = "start" if x > CENTRE + 40 else "end" if x < CENTRE - 40 else "middle"
    name = host if len(host) <= 14 else f"{host[:6]}…{host[-6:]}"
    label = f'<text class="host" x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{html.escape(name)}</text>'
    arc = f"M{x0:.1f} {y0:.1f}A{RADIUS + 34:.0f} {RADIUS + 34:.0f} 0 {large} 1 {x1:.1f} {y1:.1f}"
    shown = label if total <= MOST_NAMES or count > 2 else ""
    return f'<path class="hostarc s{colour}" d="{arc}"><title>{html.escape(host)}</title></path>{shown}'


def _line(hop: EvidenceHop, start: tuple[float, float], end: tuple[float, float], radius: float, bend: float) -> str:
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0) or 1.0
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    ax, ay, bx, by = x0 + ux * radius, y0 + uy * radius, x1 - ux * (radius + 5), y1 - uy * (radius + 5)
    mx, my = (ax + bx) / 2 - uy * bend, (ay + by) / 2 + ux * bend
    kind = "broken" if hop.wrong == "never connected" else style(hop.via)
    dashed = " between" if hop.between_hosts else ""
    said = f"{hop.src} → {hop.dst}" + (f" via {hop.via}" if hop.via else "") + (f", {hop.wrong}" if hop.wrong else "")
    tip = f"M{bx - 7 * ux + 3.6 * uy:.1f} {by - 7 * uy - 3.6 * ux:.1f}L{bx + 3 * ux:.1f} {by + 3 * uy:.1f}"
    tip += f"L{bx - 7 * ux - 3.6 * uy:.1f} {by - 7 * uy + 3.6 * ux:.1f}"
    return (
        f'<path class="hop {kind}{dashed}" d="M{ax:.1f} {ay:.1f}Q{mx:.1f} {my:.1f} {bx:.1f} {by:.1f}">'
        f'<title>{html.escape(said)}</title></path><path class="hop tip {kind}" d="{tip}"/>'
    )


def _node(rank: int, place: tuple[float, float], radius: float, culprit: bool) -> str:
    x, y = place
    name = f'<text x="{x:.1f}" y="{y:.1f}">{rank}</text>' if radius > 7 else ""
    kind = "node culprit" if culprit else "node"
    return (
        f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}"><title>rank {rank}</title></circle>{name}'
    )


def _on_circle(index: float, total: int, radius: float) -> tuple[float, float]:
    angle = 2 * math.pi * index / max(total, 1) - math.pi / 2
    return CENTRE + radius * math.cos(angle), CENTRE + radius * math.sin(angle)


def _radius(total: int) -> float:
    return min(17.0, 0.34 * 2 * math.pi * RADIUS / max(total, 1))


def _bend(hops: Sequence[EvidenceHop]) -> float:
    """Two ranks send both ways over one line: bend it apart."""
    return 26.0 if len(hops) <= 2 else 0.0

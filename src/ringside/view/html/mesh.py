"""What a job's mesh adds to a report: through whom ranks wait for a culprit, and waits along each dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringside.monitor.groups import Blocked, describe_place, read_chain
from ringside.monitor.verdict import Verdict
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.html.page import table
from ringside.view.mesh_text import BLOCKED_COLUMNS, BLOCKED_NOTE, BLOCKED_TITLE, blocked_cells, chain_dimensions

MESH_STYLES = "mesh.css"
"""The style sheet of all of it, for pages of jobs with a mesh."""
MOST_LINKS = 6
"""Of a longer chain its ends are drawn."""
RADIUS, MIDDLE = 19.0, 34.0
LEAST_APART, LETTER = 104.0, 6.6


def chain_figure(verdict: Verdict, coordinates: Sequence[Mapping[str, int]]) -> Markup:
    """Return a small picture of a verdict's chain, from who waits to the culprit; nothing where it has none.

    Args:
        verdict: It.
        coordinates: Where each rank of the job is in the mesh.
    """
    words = str(verdict.evidence.get("by_way_of", ""))
    ranks = read_chain(words)
    if not ranks:
        return NOTHING
    names = chain_dimensions(ranks, coordinates)
    cut = len(names) > MOST_LINKS
    half = MOST_LINKS // 2
    shown = [*ranks[:half], None, *ranks[-half:]] if cut else list(ranks)
    along = [*names[: half - 1], "", "", *names[-(half - 1) :]] if cut else names
    places = [
        describe_place(coordinates[rank]) if rank is not None and rank < len(coordinates) else "" for rank in shown
    ]
    # Places stand beside one another below their ranks.
    apart = max(LEAST_APART, LETTER * max(map(len, places)) + 20)
    across = [apart / 2 + apart * index for index in range(len(shown))]
    arrows = [
        fill(
            '<path class="link{last}" d="M{x0:.0f} {y:.0f}H{x1:.0f}"/><path class="tip{last}" '
            'd="M{x1:.0f} {y:.0f}l-9-4.5v9z"/><text class="along" x="{middle:.0f}" y="{above:.0f}">{name}</text>',
            last=Markup(" culprit" if index == len(along) - 1 else ""),
            x0=across[index] + RADIUS + 4,
            x1=across[index + 1] - RADIUS - (9 if index == len(along) - 1 else 5),
            y=MIDDLE,
            middle=(across[index] + across[index + 1]) / 2,
            above=MIDDLE - 11,
            name=name,
        )
        for index, name in enumerate(along)
    ]
    nodes = [_node(x, rank, place, rank == ranks[-1]) for x, rank, place in zip(across, shown, places, strict=True)]
    return fill(
        """<figure class="chain"><svg viewBox="0 0 {width:.0f} 86" style="max-width:{width:.0f}px" role="img"
 aria-label="{words}">{arrows}{nodes}</svg>
<figcaption>{words}: an arrow points to the rank that is waited for.</figcaption></figure>""",
        width=across[-1] + apart / 2,
        words=words,
        arrows=arrows,
        nodes=nodes,
    )


def _node(x: float, rank: int | None, place: str, culprit: bool) -> Markup:
    if rank is None:
        return fill('<text x="{:.0f}" y="{:.0f}">…</text>', x, MIDDLE)
    halo = (
        fill('<circle class="halo" cx="{:.0f}" cy="{:.0f}" r="{:.0f}"/>', x, MIDDLE, RADIUS + 4) if culprit else NOTHING
    )
    return fill(
        '{halo}<circle class="node{kind}" cx="{x:.0f}" cy="{y:.0f}" r="{r:.0f}"/>'
        '<text x="{x:.0f}" y="{y:.0f}">{rank}</text><text class="place" x="{x:.0f}" y="{below:.0f}">{place}</text>',
        halo=halo,
        kind=Markup(" culprit" if culprit else ""),
        x=x,
        y=MIDDLE,
        r=RADIUS,
        rank=rank,
        below=MIDDLE + 40,
        place=place,
    )


def blocked_section(blocked: Sequence[Blocked]) -> Markup:
    """Return the table of waits along each dimension as a section; nothing where none is known."""
    if not blocked:
        return NOTHING
    shown = table(BLOCKED_TITLE, BLOCKED_COLUMNS, map(blocked_cells, blocked), BLOCKED_NOTE, "wide blocked")
    return fill('<section aria-label="{}">{}</section>', BLOCKED_TITLE, shown)

"""A timeline as a page fragment for notebooks: a bar per rank, and what the critical path consists of."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from ringside.text import ms

if TYPE_CHECKING:
    from ringside.predict.simulation.timeline import Timeline

_MOST_BARS = 64
_WIDTH, _ROW = 560, 12


def bars(timeline: Timeline) -> str:
    """Return an SVG with a bar per rank, or per group of ranks: the latest of each."""
    finish = timeline.finish_seconds
    groups = np.array_split(np.arange(len(finish)), min(len(finish), _MOST_BARS))
    end = max(timeline.seconds, 1e-300)
    rows = []
    for at, group in enumerate(groups):
        last = float(finish[group].max())
        name = f"{group[0]}" if len(group) == 1 else f"{group[0]}-{group[-1]}"
        y, width = at * _ROW, _WIDTH * last / end
        title = f"<title>rank {name}: {ms(last)}</title>"
        rows.append(
            f'<text x="64" y="{y + 9}" text-anchor="end" font-size="9" fill="currentColor">{name}</text>'
            f'<rect x="70" y="{y + 2}" width="{width:.2f}" height="{_ROW - 4}" fill="#3b7dd8">{title}</rect>'
        )
    height = len(groups) * _ROW
    label = f"finish time by rank, 0 to {ms(end)}"
    return (
        f'<svg role="img" aria-label="{label}" width="{_WIDTH + 80}" height="{height}" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(rows)}</svg>'
    )


def table(timeline: Timeline) -> str:
    """Return a table of what the critical path consists of, the longest first."""
    rows = sorted(timeline.shares.items(), key=lambda item: -item[1])
    cells = "".join(f"<tr><td>{html.escape(name)}</td><td>{ms(took)}</td></tr>" for name, took in rows)
    return f"<table><caption>critical path</caption>{cells}</table>" if rows else ""


def size_words(size_bytes: float) -> str:
    """Return a size in the decimal unit that suits it, four digits."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.4g} {unit}"
    return f"{size_bytes:.4g} B"

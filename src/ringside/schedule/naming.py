"""Ranks and switches in words."""

from __future__ import annotations

from collections.abc import Iterable


def named(vertices: Iterable[int], ranks: int) -> str:
    """Say which vertices, runs of them shortened: `rank 3`, `ranks 0, 2-5`, `rank 0 and switch 8`.

    Args:
        vertices: Some of them, in any order.
        ranks: Vertices from here on are switches.
    """
    ordered = sorted(set(vertices))
    parts = [[v for v in ordered if v < ranks], [v for v in ordered if v >= ranks]]
    return " and ".join(_runs(what, part) for what, part in zip(("rank", "switch"), parts, strict=True) if part)


def _runs(what: str, ordered: list[int]) -> str:
    if len(ordered) == 1:
        return f"{what} {ordered[0]}"
    runs: list[list[int]] = []
    for vertex in ordered:
        if runs and vertex == runs[-1][-1] + 1:
            runs[-1].append(vertex)
        else:
            runs.append([vertex])
    plural = "switches" if what == "switch" else f"{what}s"
    return f"{plural} " + ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)

"""A job's mesh in words: ranks beside those that do the same work, waits along each dimension, chains of waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ringside.decoding import converted, nan_for_null
from ringside.monitor.groups import Blocked, describe_place, kind_of_work, place_in_mesh, read_chain
from ringside.monitor.verdict import Verdict
from ringside.text import duration, percent
from ringside.view.verdict_text import rank_texts

BLOCKED_TITLE = "Blocked along each dimension of the mesh"
BLOCKED_NOTE = (
    "How long a rank is blocked per step in groups along a dimension: the mean over ranks, in the median step. It is "
    "the wait for the last rank and the transfer together; what computing hides is not in it. In a group, the others "
    "wait for the rank that is blocked least."
)
BLOCKED_COLUMNS = ("along", "blocked per step", "of a step", "least", "longest")


def same_work(ranks: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return a summary's ranks in blocks that do the same work, in their order, each with its place: `pp 1, tp 0`.

    One block without a place where no two ranks differ in their work, or where none has another that does the same.
    """
    blocks: dict[str, list[dict[str, Any]]] = {}
    for rank in ranks:
        blocks.setdefault(describe_place(kind_of_work(rank.get("coordinates") or {})), []).append(rank)
    return list(blocks.items()) if 1 < len(blocks) < len(ranks) else [("", ranks)]


def rank_place(rank: Mapping[str, Any]) -> str:
    """Return where one of a summary's ranks is in the mesh; empty where that is not known."""
    return describe_place(rank.get("coordinates") or {})


def rank_cells(ranks: Sequence[dict[str, Any]], *, hosts: bool = True) -> tuple[list[str], list[list[str]]]:
    """Return the columns of a table of a summary's ranks and their texts; with their places where any has one."""
    has_mesh = any(map(rank_place, ranks))
    columns = ["rank", *["place"] * has_mesh, *["host"] * hosts, "own", "wait", "excess"]
    rows = []
    for rank in ranks:
        name, host, *times = rank_texts(rank)
        rows.append([name, *[rank_place(rank)] * has_mesh, *[host] * hosts, *times])
    return columns, rows


def mesh_order(ranks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a summary's ranks by stage, then by the part of the work that they do, then replicas."""
    return sorted(ranks, key=lambda rank: place_in_mesh(rank.get("coordinates") or {}, rank["rank"]))


def read_blocked(summary: Mapping[str, Any]) -> list[Blocked]:
    """Return a summary's waits along each dimension; nothing where it has none, or no such."""
    return converted(nan_for_null(summary.get("blocked") or []), list[Blocked], [])


def blocked_cells(one: Blocked) -> tuple[str, ...]:
    """Return a row of texts; see `BLOCKED_COLUMNS`."""
    known = [(seconds, rank) for rank, seconds in enumerate(one.ranks) if math.isfinite(seconds)]
    ends = [f"rank {rank}: {duration(seconds)}" for seconds, rank in (min(known), max(known))] if known else ["", ""]
    return (one.dimension, duration(one.seconds_per_step), percent(one.step_ratio, 1), *ends)


def blocked_line(blocked: Sequence[Blocked]) -> str:
    """Return all dimensions in one line; empty where none is known."""
    parts = [f"{one.dimension} {duration(one.seconds_per_step)} ({percent(one.step_ratio)})" for one in blocked]
    return f"blocked per step, mean rank: {' · '.join(parts)}" if parts else ""


def chain_line(verdict: Verdict) -> str:
    """Return through whom a verdict's rank holds others up, `7 → 4 → 5: 7 waits for 5 by way of 4`; empty where that is
    through nobody."""
    words = str(verdict.evidence.get("by_way_of", ""))
    ranks = read_chain(words)
    return f"{' → '.join(map(str, ranks))}: {words}" if ranks else ""


def chain_dimensions(ranks: Sequence[int], coordinates: Sequence[Mapping[str, int]]) -> list[str]:
    """Return for each link of a chain along which dimension it goes; empty where that is none, or not known.

    Args:
        ranks: Of the chain.
        coordinates: Of every rank of the job.
    """
    found = []
    for one, other in pairwise(ranks):
        places = [coordinates[rank] if rank < len(coordinates) else {} for rank in (one, other)]
        differ = [name for name in places[0] if places[1].get(name) != places[0][name]]
        found.append(differ[0] if len(differ) == 1 else "")
    return found

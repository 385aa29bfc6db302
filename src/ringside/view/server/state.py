"""What the page shows at the top, as plain data: the verdicts in words, the ranks' figures, who waits for whom."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ringside.monitor.alerts.book import as_text
from ringside.monitor.assessment import assess
from ringside.monitor.groups import describe_place, kind_of_work, place_in_mesh, read_chain
from ringside.monitor.job.questions import QUESTIONS, read_answers
from ringside.monitor.links.sampler import LinkTotals
from ringside.monitor.run.directory import finite
from ringside.monitor.stats import known_median
from ringside.schedule import ALGORITHMS, by_name
from ringside.text import duration, figure, percent, rate, size, title
from ringside.view.html.rings import longest_waits
from ringside.view.mesh_text import blocked_cells, chain_dimensions
from ringside.view.run.follower import RECENT_STEPS
from ringside.view.run.live import FIGURES, LiveRun, RankNow
from ringside.view.verdict_text import answer_sign, answer_text, checks, cost_text, verdict_text

ARROWS = 24
DRAWN_RANKS = 64
"""Up to so many ranks, the algorithm's own connections are drawn as well."""

LINKS = 32


def packed(values: ArrayLike, kind: DTypeLike) -> str:
    """Return numbers as base64 of their bytes, little-endian: as small as numbers get in JSON."""
    return base64.b64encode(np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def page_state(live: LiveRun, links: Sequence[LinkTotals]) -> dict[str, Any]:
    """Return the state of a run.

    Args:
        live: The run.
        links: What its links carried, slowest first.

    Returns:
        Names, stage and step; `verdicts` in words with prices; `undecided`, what the detector has not decided, and
        `assessment`, what that makes of a run without a verdict;
        `calm`, of an ended run without any: headline, reasons and whether it is sure; `tiles`; `figures` per rank
        (base64 float32 seconds, and ratios), medians over `window`; `arrows` [waiting, awaited, mean seconds per step],
        over `arrows_window`; `links`; `questions`; `notes`, sentences. Where they are known: `mesh`, see `_mesh`, and
        `blocked`, waits along each of its dimensions.
    """
    info, settled = live.info, live.settled
    following = live.following
    progress = {
        "name": as_text(info.name) if info else "",
        "stage": live.stage,
        "step": following.step,
        "steps": following.steps,
        "of": following.of,
        "ranks": live.ranks,
        "restarts": live.restarts,
    }
    if info is None:
        lists: dict[str, Any] = {name: [] for name in ("verdicts", "tiles", "arrows", "links", "questions", "notes")}
        return {**progress, **lists, "figures": {}}
    verdicts = _verdicts(live)
    hosts = sorted(set(info.hosts))
    own, waits = (live.recent.rows(f"{name}_seconds")[-RECENT_STEPS:].astype(np.float64) for name in ("own", "wait"))
    ranks = live.now()
    figures = {name: packed([getattr(rank, name) for rank in ranks], np.float32) for name in FIGURES}
    # Beside a mesh everybody waits in groups of their own, not for the slowest rank of the job.
    in_groups = following.waits(ARROWS) if live.blocked() else None
    answers = read_answers((settled or {}).get("questions"))
    checked = checks(answers, (finding.verdict for finding in live.findings))
    host_index = {host: index for index, host in enumerate(hosts)}
    return {
        **progress,
        "engine": as_text(info.engine),
        "algorithm": as_text(info.algorithm),
        "started_unix": info.started_unix,
        "hosts": [as_text(host) for host in hosts],
        "host_of": packed([host_index[host] for host in info.hosts[: live.ranks]], np.int32),
        "verdicts": verdicts,
        "calm": live.calm,
        "undecided": as_text(following.undecided.describe()),
        "assessment": assess(following.undecided),
        "cost": cost_text(sum(verdict["cost_rank_seconds"] for verdict in verdicts)),
        "tiles": _tiles(live, verdicts),
        "step_seconds": finite(_step_seconds(live)),
        "window": live.window,
        "figures": {**figures, "step": packed([rank.step for rank in ranks], np.float64)},
        "arrows": longest_waits(own, waits, ARROWS) if in_groups is None else in_groups,
        "arrows_window": f"last {RECENT_STEPS} steps",
        "topology": topology(info.algorithm, live.ranks),
        "links": [_link(link, info.hosts) for link in links[:LINKS]],
        "questions": [
            {
                "question": text,
                "sign": answer_sign(answers[name]),
                "answer": answer_text(answers[name]),
                **checked[name]._asdict(),
                "numbers": " · ".join(
                    f"{title(key)} {figure(key, value)}" for key, value in answers[name].numbers.items()
                ),
            }
            for name, text in QUESTIONS.items()
            if name in answers
        ],
        "notes": [as_text(note) for note in live.notes],
        **_mesh(live, ranks),
    }


def _mesh(live: LiveRun, ranks: Sequence[RankNow]) -> dict[str, Any]:
    """Where every rank is, and waits along each dimension; empty where neither is known.

    `coordinates` are base64 int32 [ranks, dimensions], -1 where not known; `order` int32, the ranks beside those that
    do the same work; `parts` what work that is, in words, and `part_of` int32 each rank's.
    """
    found: dict[str, Any] = {}
    names = list(dict.fromkeys(name for rank in ranks for name in rank.coordinates))
    if names:
        works = [describe_place(kind_of_work(rank.coordinates)) for rank in ranks]
        parts = {work: index for index, work in enumerate(dict.fromkeys(works))}
        order = sorted(ranks, key=lambda rank: place_in_mesh(rank.coordinates, rank.rank))
        found["mesh"] = {
            "dimensions": [as_text(name) for name in names],
            "coordinates": packed([[rank.coordinates.get(name, -1) for name in names] for rank in ranks], np.int32),
            "order": packed([rank.rank for rank in order], np.int32),
            "parts": [as_text(part) for part in parts],
            "part_of": packed([parts[work] for work in works], np.int32),
        }
    blocked = live.blocked()
    if blocked:
        found["blocked"] = [
            {
                "dimension": as_text(one.dimension),
                "seconds_per_step": finite(one.seconds_per_step),
                "step_ratio": finite(one.step_ratio),
                "ranks": packed(one.ranks, np.float32),
                "cells": [as_text(cell) for cell in blocked_cells(one)],
            }
            for one in blocked
        ]
    return found


def topology(algorithm: str, ranks: int) -> dict[str, Any] | None:
    """Return which ranks an algorithm connects, `edges` [[src, dst], ...], and whether they form a tree; None where
    it is not one of ours, connects all with all, or has too many ranks to be drawn."""
    if algorithm not in ALGORITHMS or not 1 < ranks <= DRAWN_RANKS:
        return None
    schedule = by_name(algorithm, ranks)
    edges: set[tuple[int, int]] = set()
    for index in range(schedule.rounds):
        ends = ((src, dst) for src, dst, _, _ in schedule.round(index))
        edges.update((min(pair), max(pair)) for pair in ends if max(pair) < ranks)
    # All with all: a picture of it would be a black disc.
    if len(edges) == ranks * (ranks - 1) // 2 and ranks > 3:
        return None
    return {"edges": sorted(edges), "tree": ranks > 2 and len(edges) == ranks - 1}


def _verdicts(live: LiveRun) -> list[dict[str, Any]]:
    """The verdicts in words, with what they cost so far."""
    # What the text of a verdict needs of a summary, where there is none of yet.
    context = live.settled or {
        "world_size": live.ranks,
        "steps": live.following.steps,
        "step_seconds": {"median": finite(live.following.median("step_seconds"))},
    }
    found = []
    for finding in live.findings:
        content = msgspec.to_builtins(finding.verdict)
        content["cost_rank_seconds"] = finding.cost_rank_seconds
        if finding.until_step is not None:
            content["evidence"].setdefault("until_step", finding.until_step)
        try:
            text = verdict_text(content, context)
        except (msgspec.ValidationError, ArithmeticError, KeyError, TypeError, ValueError):
            continue  # a verdict that makes no sense; the others are shown
        verdict, cost = text.verdict, text.verdict.cost_rank_seconds
        chain = read_chain(verdict.evidence.get("by_way_of", ""))
        places = [] if live.following.mesh is None else live.following.mesh.coordinates
        found.append({
            **{name: as_text(getattr(text, name)) for name in ("headline", "when", "why", "price", "next")},
            "kind": verdict.kind,
            "ranks": verdict.ranks,
            "since_step": verdict.since_step,
            "until_step": verdict.evidence.get("until_step"),
            "cost_rank_seconds": cost if math.isfinite(cost) else 0.0,
            "over": finding.over,
            **({
                "by_way_of": verdict.evidence["by_way_of"],
                "chain": {"ranks": chain, "along": [as_text(name) for name in chain_dimensions(chain, places)]},
            } if chain else {}),
        })  # fmt: skip
    return found


def _step_seconds(live: LiveRun) -> float:
    """The median step: over the whole run once that has ended, else over the last steps; NaN = not known."""
    if live.settled:
        return live.settled["step_seconds"]["median"] or math.nan
    return live.following.median("step_seconds")


def _tiles(live: LiveRun, verdicts: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Name, value, and a remark of the figures that a run is known by; medians over `live.window`."""
    following, settled = live.following, live.settled
    step, exposed, sync = _step_seconds(live), following.exposed_seconds(), following.median("sync_seconds")
    if settled:
        exposed, total = (settled["sync"][f"{name}_seconds_per_step"] for name in ("exposed", "total"))
        exposed, sync = exposed or 0.0, math.nan if total is None else total
    wait = known_median(np.array([rank.wait_seconds for rank in live.now()]), math.nan)
    share = f"{percent(exposed / step, 1)} of a step; " if step > 0 else ""
    # Communication that backward computation hid.
    hidden = max(1.0 - exposed / sync, 0.0) if sync > 0 else math.nan
    is_unseen = math.isnan(sync) and step > 0  # of a model that is only watched, or of groups
    overlapped = "not measured where Ringside only watches" if is_unseen else f"of {duration(sync)} communication"
    lost = sum(verdict["cost_rank_seconds"] for verdict in verdicts)
    each = f"{duration(lost / live.ranks)} for every rank" if lost else "no verdict has a cost"
    return [
        ("lost" if settled else "lost so far", cost_text(lost) if lost else "nothing", each),
        ("step time", duration(step), f"median, {live.window}"),
        ("exposed communication", duration(exposed), f"{share}median, {live.window}"),
        ("overlapped with backward", percent(hidden, 1), overlapped),
        ("wait", duration(wait), f"for the last rank to arrive; median rank, {live.window}"),
    ]


def _link(link: LinkTotals, hosts: Sequence[str]) -> dict[str, Any]:
    ends = [as_text(hosts[end]) if 0 <= end < len(hosts) else "" for end in (link.src, link.dst)]
    return {
        "src": link.src,
        "dst": link.dst,
        "hosts": " → ".join(ends),
        "rate": rate(link.bytes_per_s),
        "bytes_per_s": link.bytes_per_s,
        "sent": size(link.sent_bytes),
        "wire": duration(link.wire_seconds),
        "ratio": percent(link.wire_ratio, 1),
        "again": size(link.retransmitted_bytes),
    }

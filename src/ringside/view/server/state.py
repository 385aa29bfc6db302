"""What the page shows at the top, as plain data: the verdicts in words, the ranks' figures, who waits for whom."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from ringside.monitor.alerts.book import as_text
from ringside.monitor.job.questions import QUESTIONS, read_answers
from ringside.monitor.links.sampler import LinkTotals
from ringside.monitor.run.directory import Event
from ringside.schedule import ALGORITHMS, by_name
from ringside.text import duration, figure, rank_time, share, size, title
from ringside.view.html.waits_ring import Wait, longest_waits
from ringside.view.run.live import FEW, LiveRun, ShownFinding
from ringside.view.verdict_text import VerdictText, answer, sign, tell

ARROWS = 24
DRAWN_RANKS = 64
"""Up to so many ranks, the algorithm's own connections are drawn as well."""

MOST_EDGES = 600
LINKS = 32


def packed(values: ArrayLike, kind: DTypeLike) -> str:
    """Return numbers as base64 of their bytes, little-endian: as small as numbers get in JSON."""
    return base64.b64encode(np.ascontiguousarray(values, dtype=np.dtype(kind).newbyteorder("<")).tobytes()).decode()


def now(live: LiveRun, links: Sequence[LinkTotals], settled: dict[str, Any] | None) -> dict[str, Any]:
    """Return the state of a run.

    Args:
        live: The run.
        links: What its links carried, slowest first.
        settled: The summary of a run that goes on no more, judged from all its records; None while it goes on.

    Returns:
        Names, stage and step; `verdicts` in words with prices; `tiles`; `figures` per rank (base64 float32 seconds,
        and ratios); `arrows` [waiting, awaited, seconds per step]; `links`; `questions`; `notes`, sentences.
    """
    info = live.info
    if info is None:
        return {
            **live.as_dict(),
            "verdicts": [],
            "tiles": [],
            "figures": {},
            "arrows": [],
            "links": [],
            "questions": [],
            "notes": [],
        }
    context = settled or _context(live)
    verdicts = _settled_verdicts(settled) if settled else _verdicts(live, context)
    hosts = sorted(set(info.hosts))
    where = {host: index for index, host in enumerate(hosts)}
    return {
        **live.as_dict(),
        "name": as_text(info.name),
        "engine": as_text(info.engine),
        "algorithm": as_text(info.algorithm),
        "started_unix": info.started_unix,
        "hosts": [as_text(host) for host in hosts],
        "host_of": packed([where[host] for host in info.hosts[: live.ranks]], np.int32),
        "verdicts": verdicts,
        "cost": rank_time(sum(verdict["cost_rank_seconds"] for verdict in verdicts)),
        "tiles": _tiles(live, verdicts),
        "step_seconds": _or_none(live.following.middle("step_seconds")),
        "figures": _figures(live),
        "arrows": _arrows(live),
        "topology": topology(info.algorithm, live.ranks),
        "links": [_link(link, info.hosts) for link in links[:LINKS]],
        "questions": _questions(settled),
        "notes": [as_text(one.describe()) for one in live.following.revised],
    }


def topology(algorithm: str, ranks: int) -> dict[str, Any] | None:
    """Return which ranks an algorithm connects, `edges` [[src, dst], ...], and whether they form a tree; None where
    it is not one of ours, connects all with all, or has too many to draw."""
    if algorithm not in ALGORITHMS or not 1 < ranks <= DRAWN_RANKS:
        return None
    schedule = by_name(algorithm, ranks)
    edges: set[tuple[int, int]] = set()
    for index in range(schedule.rounds):
        step = schedule.round(index)
        pairs = zip(step.src.tolist(), step.dst.tolist(), strict=True)
        edges.update((min(pair), max(pair)) for pair in pairs if max(pair) < ranks)
        if len(edges) > MOST_EDGES:
            return None
    if len(edges) == ranks * (ranks - 1) // 2 and ranks > 3:
        return None
    return {"edges": sorted(edges), "tree": ranks > 2 and len(edges) == ranks - 1}


def _context(live: LiveRun) -> dict[str, Any]:
    """What words about a verdict need of a summary."""
    return {"world_size": live.ranks, "steps": live.following.step + 1,
            "step_seconds": {"median": _or_none(live.following.middle("step_seconds"))}}  # fmt: skip


def _verdicts(live: LiveRun, context: dict[str, Any]) -> list[dict[str, Any]]:
    ends = _ends(live.events)
    found = (_live_verdict(finding, ends, context) for finding in live.findings)
    return [verdict for verdict in found if verdict is not None]


def _live_verdict(finding: ShownFinding, ends: dict[Any, int], context: dict[str, Any]) -> dict[str, Any] | None:
    content = msgspec.to_builtins(finding.verdict)
    content["cost_rank_seconds"] = finding.cost_rank_seconds
    until = ends.get((finding.verdict.kind, tuple(finding.verdict.ranks)))
    if finding.over and until is not None:
        content["evidence"] = {**content["evidence"], "until_step": until}
    return _told(content, context, over=finding.over)


def _settled_verdicts(summary: dict[str, Any]) -> list[dict[str, Any]]:
    found = [_told(content, summary, over="until_step" in content["evidence"]) for content in summary["verdicts"]]
    return sorted((verdict for verdict in found if verdict is not None), key=lambda verdict: bool(verdict["over"]))


def _told(content: dict[str, Any], context: dict[str, Any], *, over: bool) -> dict[str, Any] | None:
    try:
        told = tell(content, context)
    except (msgspec.ValidationError, ArithmeticError, KeyError, TypeError, ValueError):
        return None  # a verdict that says nonsense; the others are shown
    return {**_words(told), "over": over}


def _words(told: VerdictText) -> dict[str, Any]:
    verdict, cost = told.verdict, told.verdict.cost_rank_seconds
    texts = {name: as_text(getattr(told, name)) for name in ("headline", "when", "why", "price", "next")}
    return {
        **texts,
        "kind": verdict.kind,
        "ranks": verdict.ranks,
        "since_step": verdict.since_step,
        "until_step": verdict.evidence.get("until_step"),
        "cost_rank_seconds": cost if math.isfinite(cost) else 0.0,
    }


def _ends(events: Iterable[Event]) -> dict[Any, int]:
    """The step at which episodes ended, by kind and ranks."""
    found: dict[Any, int] = {}
    for event in events:
        verdict = event.get("verdict")
        if event["kind"] == "repaired" and isinstance(verdict, dict):
            until = (verdict.get("evidence") or {}).get("until_step")
            if isinstance(until, int):
                found[verdict.get("kind"), tuple(verdict.get("ranks") or ())] = until
    return found


def _tiles(live: LiveRun, verdicts: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Name, value, and a remark of the figures that a run is known by; medians over the last steps."""
    step, exposed, sync, wait = (
        live.following.middle(f"{name}_seconds") for name in ("step", "exposed", "sync", "wait")
    )
    hidden = max(1.0 - exposed / sync, 0.0) if sync > 0 else math.nan
    lost = sum(verdict["cost_rank_seconds"] for verdict in verdicts)
    each = f"{duration(lost / live.ranks)} for every rank" if lost else "no verdict has a price"
    return [
        ("lost so far", rank_time(lost) if lost else "nothing", each),
        ("step", duration(step), f"the last {FEW} steps"),
        ("exposed sync", duration(exposed), f"{share(exposed / step)[1:]} of a step" if step > 0 else ""),
        ("hidden behind backward", share(hidden)[1:] or "–", f"of {duration(sync)} communication"),
        ("wait", duration(wait), "for the last rank to arrive"),
    ]


def _figures(live: LiveRun) -> dict[str, str]:
    ranks = live.now()
    names = ("own_seconds", "wait_seconds", "wire_seconds", "excess_ratio")
    return {name: packed([getattr(rank, name) for rank in ranks], np.float32) for name in names} | {
        "step": packed([rank.step for rank in ranks], np.float64)
    }


def _arrows(live: LiveRun) -> list[Wait]:
    """Who waits for whom over the last steps, the longest first."""
    own, waits = (live.rows(f"{name}_seconds")[-FEW:].astype(np.float64) for name in ("own", "wait"))
    return longest_waits(own, waits, ARROWS)


def _link(link: LinkTotals, hosts: Sequence[str]) -> dict[str, Any]:
    ends = [as_text(hosts[end]) if 0 <= end < len(hosts) else "" for end in (link.src, link.dst)]
    return {
        "src": link.src,
        "dst": link.dst,
        "hosts": " → ".join(ends),
        "rate": f"{size(link.bytes_per_s)}/s",
        "bytes_per_s": link.bytes_per_s,
        "sent": size(link.sent_bytes),
        "wire": duration(link.wire_seconds),
        "ratio": share(link.wire_ratio).removeprefix("+"),
        "again": size(link.retransmitted_bytes),
    }


def _questions(summary: dict[str, Any] | None) -> list[dict[str, str]]:
    answers = read_answers((summary or {}).get("questions"))
    return [
        {
            "question": text,
            "sign": sign(answers[name]),
            "answer": answer(answers[name]),
            "numbers": " · ".join(f"{title(key)} {figure(key, value)}" for key, value in answers[name].numbers.items()),
        }
        for name, text in QUESTIONS.items()
        if name in answers
    ]


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None

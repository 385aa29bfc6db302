"""A run's report: one HTML file that needs nothing else, the verdict first."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from importlib import resources
from typing import Any

import numpy as np

from ringside.monitor.job.questions import read_answers
from ringside.monitor.run.algorithm_changes import revision_notes
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.run.table import StepTable, fill_waits, tabulate
from ringside.monitor.stats import Floats
from ringside.monitor.verdict import Verdict, name_ranks
from ringside.text import UNKNOWN, digits, duration, moment, ratio, share, size
from ringside.view.html.charts import ChartMark, Series, chart
from ringside.view.html.waits_ring import longest_waits, ring
from ringside.view.tui.console import without_controls
from ringside.view.verdict_text import FEWEST_STEPS, VerdictText, all_is_well, answers_section, no_verdict, tell

# -------------------------------------------------------------------------------------------------
# The links between hosts in a run's report: what each carried, how fast, and for how long.

MOST_ROWS = 32
COLUMNS = ("link", "hosts", "rate", "carried", "wire time", "of the run", "sent again")


def links_table(summary: dict[str, Any], verdicts: Iterable[Verdict]) -> str:
    """Return the table of a summary's links, slowest first; empty where no wire was watched.

    Args:
        summary: The content of `summary.json`.
        verdicts: Its verdicts: links that they name are marked.
    """
    links = summary.get("links") or []
    if not links:
        return ""
    slow = {tuple(verdict.ranks) for verdict in verdicts if verdict.kind == "slow_link"}
    hosts = {rank["rank"]: str(rank["host"]) for rank in summary["ranks"]}
    rows = "".join(_row(link, hosts, (link["src"], link["dst"]) in slow) for link in links[:MOST_ROWS])
    more = f" (the {MOST_ROWS} slowest of {len(links)})" if len(links) > MOST_ROWS else ""
    heads = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in COLUMNS)
    return f"""<section aria-label="Links"><figure class="wide">
<figcaption>Links between hosts, as the kernel counts{more}</figcaption>
<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></figure></section>"""


def _row(link: dict[str, Any], hosts: dict[int, str], culprit: bool) -> str:
    rate = UNKNOWN if link["bytes_per_s"] is None else f"{size(link['bytes_per_s'])}/s"
    cells = (
        rate,
        size(link["sent_bytes"]),
        duration(link["wire_seconds"]),
        share(link["wire_ratio"]).removeprefix("+"),
        size(link["retransmitted_bytes"]),
    )
    mark, badge = (' class="culprit"', ' <span class="badge">verdict</span>') if culprit else ("", "")
    places = " → ".join(hosts.get(link[end], "") for end in ("src", "dst"))
    return (
        f'<tr{mark}><th scope="row">{link["src"]} → {link["dst"]}{badge}</th>'
        f'<td class="text">{html.escape(places)}</td>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
    )


SINGLE_LINES = 8
MOST_ARROWS = 16
"""Up to so many ranks each have a line of their own; more are a band with its median, and the culprits."""


def render_report(summary: dict[str, Any], run_info: RunInfo, records: Iterable[StepRecord] | StepTable) -> str:
    """Return the report as one self-contained HTML page.

    Args:
        summary: The content of `summary.json`.
        run_info: The content of `run.json`.
        records: All step records, in any order, or a table of them.
    """
    table = records if isinstance(records, StepTable) else tabulate(records, run_info.world_size)
    verdicts = [tell(verdict, summary) for verdict in summary["verdicts"]]
    # Of a slow link neither end is to blame.
    blamed = [told.verdict for told in verdicts if told.verdict.kind != "slow_link"]
    culprits = {rank for verdict in blamed for rank in verdict.ranks if 0 <= rank < table.ranks}
    arrows = longest_waits(*_ring_steps(table, verdicts), MOST_ARROWS if table.ranks > 8 else 2 * MOST_ARROWS)
    body = [
        _header(run_info, summary),
        _verdicts(verdicts, summary),
        _notes(summary),
        _figures(summary),
        answers_section(read_answers(summary.get("questions"))),
        f'<section aria-label="Over time">{_charts(table, verdicts, culprits)}</section>' if len(table) else "",
        f'<section aria-label="Ranks">{ring(arrows, table.ranks, culprits)}{_rank_table(summary, culprits)}</section>',
        links_table(summary, [told.verdict for told in verdicts]),
        _details(summary, run_info),
    ]
    title = html.escape(f"{run_info.name} · Ringside")
    return without_controls(f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title><style>{_asset("report.css")}</style></head>
<body><main>{"".join(body)}</main><script>{_asset("report.js")}</script></body></html>
""")


def _asset(name: str) -> str:
    return resources.files("ringside.view").joinpath(name).read_text(encoding="utf-8")


def _header(info: RunInfo, summary: dict[str, Any]) -> str:
    hosts = len(set(info.hosts)) or 1
    where = f"{info.world_size} rank{_s(info.world_size)} on {hosts} host{_s(hosts)}"
    started = moment(info.started_unix)
    return f"""<header><p class="brand">Ringside</p><p class="run">{html.escape(info.name)}</p>
<p class="meta">{started} · {where} · {html.escape(info.engine)}
 · {summary["steps"]} step{_s(summary["steps"])}</p></header>"""


def _verdicts(verdicts: list[VerdictText], summary: dict[str, Any]) -> str:
    if not verdicts:
        sign, kind = ("✓", "well") if summary["steps"] >= FEWEST_STEPS else ("?", "open")
        return f"""<section class="verdict {kind}" aria-label="Verdict">
<p class="sign"><span aria-hidden="true">{sign}</span>verdict</p><h1>{no_verdict(summary)}</h1>
<p>{_text(all_is_well(summary))}</p></section>"""
    return "".join(_verdict(told, first=index == 0) for index, told in enumerate(verdicts)) + _revealed(summary)


def _verdict(told: VerdictText, *, first: bool) -> str:
    level = "h1" if first else "h2"
    parts = (("Why", told.why), ("Price", told.price), ("Next", told.next))
    rows = "".join(f"<dt>{name}</dt><dd>{_text(text)}</dd>" for name, text in parts if text)
    kind = html.escape(told.verdict.kind.replace("_", " "))
    return f"""<section class="verdict bad" aria-label="Verdict"><p class="sign"><span aria-hidden="true">!</span>
verdict · {kind}</p><{level}>{html.escape(told.headline)}</{level}><p class="when">{html.escape(told.when)}</p>
<dl>{rows}</dl></section>"""


def _revealed(summary: dict[str, Any]) -> str:
    """What the demo had injected, which the detector never saw."""
    injected = summary.get("injected")
    if not injected:
        return ""
    who, factor = name_ranks(list(injected.get("ranks") or [])), injected.get("factor")
    how = f", {ratio(factor)} its time" if isinstance(factor, int | float) else ""
    what, step = injected.get("kind"), injected.get("from_step")
    text = f"What had been injected, unknown to the detector: {what}, {who}{how}, from step {step}."
    return f'<p class="revealed">{html.escape(text)}</p>'


def _notes(summary: dict[str, Any]) -> str:
    """When gradients went another way between hosts."""
    said = "".join(f'<p class="revealed">{html.escape(words)}</p>' for words in revision_notes(summary))
    return f'<section aria-label="Notes">{said}</section>' if said else ""


def _figures(summary: dict[str, Any]) -> str:
    step, sync = summary["step_seconds"], summary["sync"]
    loss, comparison = summary.get("loss") or {}, summary.get("comparison") or {}
    median = step["median"] or 0.0
    exposed = sync["exposed_seconds_per_step"] or 0.0
    tiles = [
        ("step time", duration(median), f"95th percentile {duration(step['p95'])}"),
        ("exposed sync", duration(exposed), f"{share(exposed / median)[1:]} of a step" if median else ""),
        ("own overhead", duration(summary["overhead"]["seconds_per_step"]), _plain(summary["overhead"]["ratio"])),
    ]
    if loss.get("last") is not None and loss.get("first") is not None:
        tiles.append(("loss", digits(loss["last"]), f"from {digits(loss['first'])}"))
    if comparison.get("step_ratio") is not None:
        peer = str(comparison.get("peer", "the peer"))
        tiles.append((f"against {peer}", ratio(comparison["step_ratio"]), f"{peer}'s step time over ours"))
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{cells}</dl>'


def _plain(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f} % of a step"


def _charts(table: StepTable, verdicts: list[VerdictText], culprits: set[int]) -> str:
    marks = [_mark(told) for told in verdicts]
    steps = [int(step) for step in table.steps]
    own = _lines(table["own_seconds"], culprits)
    wait = _lines(fill_waits(table), culprits)
    charts = [chart("own", "Own time per rank: work from one synchronisation to the next", steps, own, marks=marks)]
    charts.append(chart("wait", "Wait per rank: the culprit is the one that waits least", steps, wait, marks=marks))
    losses = table["loss"]
    if np.isfinite(losses).any():
        mean = np.array([np.nan if np.isnan(row).all() else np.nanmean(row) for row in losses])
        line = Series(name="mean over ranks", values=mean, style="s0")
        charts.insert(0, chart("loss", "Loss", steps, [line], text=digits, from_zero=False))
    return "".join(charts)


def _mark(told: VerdictText) -> ChartMark:
    until = told.verdict.evidence.get("until_step")
    ranks = told.verdict.ranks
    who = f"link {' → '.join(map(str, ranks))}" if told.verdict.kind == "slow_link" else name_ranks(ranks)
    label = f"{who}, from step {told.verdict.since_step}"
    return ChartMark(since=told.verdict.since_step, until=None if until is None else int(until), label=label)


def _lines(values: Floats, culprits: set[int]) -> list[Series]:
    """One line per rank, or a band for the many; the culprits last, on top."""
    ranks = values.shape[1]
    named = [rank for rank in range(ranks) if rank in culprits]
    others = [rank for rank in range(ranks) if rank not in culprits]
    if ranks <= SINGLE_LINES:
        lines = [Series(name=f"rank {rank}", values=values[:, rank], style=f"s{rank}") for rank in others]
    else:
        lines = [_crowd(values[:, others], len(others))]
    return [
        *lines,
        *(Series(name=f"rank {rank} (verdict)", values=values[:, rank], style="culprit") for rank in named[:6]),
    ]


def _crowd(values: Floats, count: int) -> Series:
    low, middle, high = (_quantiles(values, q) for q in (0.05, 0.5, 0.95))
    return Series(name=f"{count} other ranks: median, 5–95 %", values=middle, style="crowd", low=low, high=high)


def _quantiles(values: Floats, q: float) -> Floats:
    known = ~np.isnan(values).all(axis=1)
    result = np.full(len(values), np.nan)
    result[known] = np.nanquantile(values[known], q, axis=1)
    return result


def _ring_steps(table: StepTable, verdicts: list[VerdictText]) -> tuple[Floats, Floats]:
    """The steps the picture of the ring is about: those of the first verdict, or the whole run."""
    if verdicts and len(table):
        until = verdicts[0].verdict.evidence.get("until_step")
        table = table.between(verdicts[0].verdict.since_step, None if until is None else int(until))
    return table["own_seconds"], fill_waits(table)


def _rank_table(summary: dict[str, Any], culprits: set[int]) -> str:
    ranks = summary["ranks"]
    if len(ranks) > 2 * SINGLE_LINES:
        ranks = sorted(ranks, key=lambda rank: (rank["rank"] not in culprits, -(rank["excess_ratio"] or 0.0)))
    rows = "".join(_rank_row(rank, rank["rank"] in culprits) for rank in ranks)
    return f"""<figure class="wide"><figcaption>Every rank (medians over the run)</figcaption><div class="scroll">
<table><thead><tr><th scope="col">rank</th><th scope="col">host</th><th scope="col">own</th><th scope="col">wait</th>
<th scope="col">excess</th></tr></thead><tbody>{rows}</tbody></table></div></figure>"""


def _rank_row(rank: dict[str, Any], culprit: bool) -> str:
    cells = (duration(rank["own_seconds_median"]), duration(rank["wait_seconds_median"]), share(rank["excess_ratio"]))
    mark = ' class="culprit"' if culprit else ""
    badge = ' <span class="badge">verdict</span>' if culprit else ""
    return (
        f'<tr{mark}><th scope="row">{rank["rank"]}{badge}</th><td class="text">{html.escape(str(rank["host"]))}</td>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
    )


def _details(summary: dict[str, Any], info: RunInfo) -> str:
    sync, comparison = summary["sync"], summary.get("comparison") or {}
    carried = sync["engine"] + (f", {sync['algorithm']}" if sync["algorithm"] else "")
    rows = [
        ("gradients carried by", carried),
        ("gradient buckets", _memory(sync.get("memory") or {})),
        ("payload per step", size(sync["payload_bytes_per_step"])),
        ("sync per step, overlapped or not", duration(sync["total_seconds_per_step"])),
        ("of it exposed", duration(sync["exposed_seconds_per_step"])),
        *((f"comparison: {key.replace('_', ' ')}", _figure(value)) for key, value in comparison.items()),
        ("command", " ".join(info.command)),
        ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())),
    ]
    cells = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in rows if value)
    return f"""<section class="details" aria-label="Details"><h2>Figures</h2><dl>{cells}</dl></section>
<footer>Own time is a rank's work from the end of one synchronisation to its arrival at the next. The price replays the
recorded own times with the culprit repaired: ranks × (slowest of all − slowest with it repaired), summed over
steps.</footer>"""


def _memory(memory: dict[str, int]) -> str:
    """Return which of the buckets the ranks of a host map, and which are copied."""
    return ", ".join(
        f"{memory[f'{way}_buckets']} {way} ({size(memory[f'{way}_bytes'])})"
        for way in ("shared", "copied")
        if memory.get(f"{way}_buckets")
    )


def _figure(value: object) -> str:
    return digits(value) if isinstance(value, float) else str(value)


def _text(text: str) -> str:
    """Return text safe for HTML, with numbers kept on one line with their units."""
    return html.escape(re.sub(r"(?<=\d) (?=%|(?:[mµn]?s|min|h|d)\b)", "\u00a0", text))


def _s(count: int) -> str:
    return "" if count == 1 else "s"

"""A run's report: one HTML file that needs nothing else, the verdict first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from ringside.monitor.job.questions import read_answers
from ringside.monitor.run.records import RunInfo, StepRecord, summary_notes
from ringside.monitor.run.table import StepTable, fill_waits, tabulate
from ringside.monitor.stats import Floats
from ringside.monitor.verdict import Verdict
from ringside.text import counted, digits, duration, figure, label, moment, name_ranks, percent, rate, ratio, size
from ringside.view.html.charts import ChartMark, Curve, chart
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.html.mesh import MESH_STYLES, blocked_section, chain_figure
from ringside.view.html.page import (
    checks_section,
    column_head,
    render_page,
    table_figure,
    table_row,
    tiles,
    verdict_section,
)
from ringside.view.html.rings import longest_waits, waits_ring
from ringside.view.mesh_text import mesh_order, rank_cells, rank_place, read_blocked, same_work
from ringside.view.verdict_text import VerdictText, describe_calm, slowest_first, verdict_text

SINGLE_LINES = 8
"""Up to so many ranks each have a line of their own; more are a band with its median, and the culprits."""
MOST_CULPRITS = 6
MOST_ARROWS = 16
MOST_LINKS = 32
LINK_COLUMNS = ("link", "hosts", "rate", "carried", "wire time", "of the run", "sent again")


def render_report(summary: dict[str, Any], run_info: RunInfo, records: Iterable[StepRecord] | StepTable) -> str:
    """Return the report as one self-contained HTML page.

    Args:
        summary: The content of `summary.json`.
        run_info: The content of `run.json`.
        records: All step records, in any order, or a table of them.
    """
    table = records if isinstance(records, StepTable) else tabulate(records, run_info.world_size)
    verdicts = [verdict_text(verdict, summary) for verdict in summary["verdicts"]]
    # Of a slow link neither end is to blame.
    blamed = [text.verdict for text in verdicts if text.verdict.kind != "slow_link"]
    culprits = {rank for verdict in blamed for rank in verdict.ranks if 0 <= rank < table.ranks}

    # The picture of the ring is about the steps of the first verdict, or about the whole run.
    steps, window = table, "whole run"
    if verdicts and len(table):
        steps = table.between(verdicts[0].verdict.since_step, _end_of(verdicts[0].verdict))
        if len(steps):
            window = f"steps {steps.steps[0]} to {steps.steps[-1]}"
    most = MOST_ARROWS if table.ranks > 8 else 2 * MOST_ARROWS
    has_mesh = any(map(rank_place, summary["ranks"]))
    blocked = read_blocked(summary)
    arrows = longest_waits(steps["own_seconds"], fill_waits(steps), most)
    # Beside a mesh everybody waits in groups of their own, not for the slowest rank of the job.
    if waits := summary.get("waits"):
        window = f"steps {waits['first_step']} to {waits['last_step']}"
        arrows = [(one["rank"], one["awaited"], one["seconds_per_step"]) for one in waits["longest"][:most]]

    own, *over_time = _charts(table, verdicts, culprits)
    changes = [fill('<p class="revealed">{}</p>', text) for text in summary_notes(summary)]
    sections = [
        *_verdict_sections(verdicts, summary),
        fill('<section aria-label="Notes">{}</section>', changes) if changes else NOTHING,
        # The proof, who waited for whom, the checks, then the rest.
        fill('<section aria-label="Own time">{}</section>', own) if len(table) else NOTHING,
        fill(
            '<section aria-label="Who waits for whom">{}</section>', waits_ring(arrows, table.ranks, culprits, window)
        ),
        blocked_section(blocked),
        checks_section(read_answers(summary.get("questions")), [text.verdict for text in verdicts]),
        _figures(summary),
        fill('<section aria-label="Over time">{}</section>', over_time) if len(table) else NOTHING,
        fill('<section aria-label="Ranks">{}</section>', _rank_table(summary, culprits)),
        links_table(summary, [text.verdict for text in verdicts]),
        _details(summary, run_info),
    ]
    hosts = len(set(run_info.hosts)) or 1
    where = f"{counted(run_info.world_size, 'rank')} on {counted(hosts, 'host')}"
    meta = f"{moment(run_info.started_unix)} · {where} · {run_info.engine}\n · {counted(summary['steps'], 'step')}"
    scripts = ("brush.js", "report.js")
    styles = ("report.css", *([MESH_STYLES] if has_mesh or blocked else []))
    return render_page(run_info.name, run_info.name, meta, sections, styles=styles, scripts=scripts)


def links_table(summary: dict[str, Any], verdicts: Iterable[Verdict]) -> Markup:
    """Return the links between hosts, slowest first: what each carried, how fast, for how long.

    Args:
        summary: The content of `summary.json`. Without a link that was watched nothing is returned.
        verdicts: Its verdicts: links that they name are marked.
    """
    links = summary.get("links") or []
    if not links:
        return NOTHING
    slow = {tuple(verdict.ranks) for verdict in verdicts if verdict.kind == "slow_link"}
    hosts = {rank["rank"]: str(rank["host"]) for rank in summary["ranks"]}
    rows = []
    for link in links[:MOST_LINKS]:
        cells = (
            rate(link["bytes_per_s"]),
            size(link["sent_bytes"]),
            duration(link["wire_seconds"]),
            percent(link["wire_ratio"], 1),
            size(link["retransmitted_bytes"]),
        )
        src, dst = link["src"], link["dst"]
        where = f"{hosts.get(src, '')} → {hosts.get(dst, '')}"
        rows.append(table_row(f"{src} → {dst}", cells, [where], culprit=(src, dst) in slow))
    more = f" (the {MOST_LINKS} slowest of {len(links)})" if len(links) > MOST_LINKS else ""
    title = f"Links between hosts, as the kernel counts{more}"
    shown = table_figure("wide", title, map(column_head, LINK_COLUMNS), rows)
    return fill('<section aria-label="Links">{}</section>', shown)


def _verdict_sections(verdicts: list[VerdictText], summary: dict[str, Any]) -> list[Markup]:
    """Return a section for every verdict, and what the demo had injected, which the detector never saw."""
    if not verdicts:
        calm = describe_calm(summary)
        kind, mark = ("well", "✓") if calm.sure else ("open", "?")
        why = fill("<p>{}</p>", _keep_units(calm.text))
        return [verdict_section("verdict", calm.headline, kind=kind, mark=mark, text=why)]
    sections = [
        verdict_section(
            f"\nverdict · {label(text.verdict.kind)}",
            text.headline,
            [("Why", _keep_units(text.why)), ("Cost", _keep_units(text.price)), ("Next", _keep_units(text.next))],
            kind="bad",
            level=1 if text is verdicts[0] else 2,
            text=fill('<p class="when">{}</p>', text.when),
            more=chain_figure(text.verdict, [rank.get("coordinates") or {} for rank in summary["ranks"]]),
        )
        for text in verdicts
    ]
    injected = summary.get("injected")
    if injected:
        who, factor = name_ranks(injected.get("ranks") or []) or "the job", injected.get("factor")
        how = f", {ratio(factor)} its time" if isinstance(factor, int | float) else ""
        what = f"{injected.get('kind')}, {who}{how}, from step {injected.get('from_step')}"
        text = f"What had been injected, unknown to the detector: {what}."
        sections.append(fill('<p class="revealed">{}</p>', text))
    return sections


def _figures(summary: dict[str, Any]) -> Markup:
    step, sync, overhead = summary["step_seconds"], summary["sync"], summary["overhead"]
    loss, comparison = summary.get("loss") or {}, summary.get("comparison") or {}
    median = step["median"] or 0.0
    exposed = sync["exposed_seconds_per_step"] or 0.0
    of_median = f"{percent(exposed / median, 1)} of a step; " if median else ""
    of_step = ("" if overhead["ratio"] is None else f"{percent(overhead['ratio'], 2)} of a step; ") + "mean, whole run"
    cells = [
        ("step time", duration(median), f"median, whole run; 95th percentile {duration(step['p95'])}"),
        ("exposed communication", duration(exposed), f"{of_median}median, whole run"),
        ("Ringside overhead", duration(overhead["seconds_per_step"]), of_step),
    ]
    if loss.get("last") is not None and loss.get("first") is not None:
        cells.append(("loss", digits(loss["last"]), f"from {digits(loss['first'])}"))
    if comparison.get("step_ratio") is not None:
        peer = str(comparison.get("peer", "the peer"))
        cells.append((f"vs {peer}", ratio(comparison["step_ratio"]), f"{peer}'s step time over ours"))
    return tiles(cells)


def _charts(table: StepTable, verdicts: list[VerdictText], culprits: set[int]) -> list[Markup]:
    """Return the charts over steps, own time first."""
    marks = []
    for verdict in (text.verdict for text in verdicts):
        link = f"link {' → '.join(map(str, verdict.ranks))}"
        who = link if verdict.kind == "slow_link" else name_ranks(verdict.ranks) or "the job"
        marks.append(ChartMark(verdict.since_step, _end_of(verdict), f"{who}, from step {verdict.since_step}"))
    own, wait = (_lines(table.steps, values, culprits) for values in (table["own_seconds"], fill_waits(table)))
    charts = [
        chart("own", "Own time per rank: work from one synchronisation to the next", own, marks=marks),
        chart("wait", "Wait per rank: the culprit is the one that waits least", wait, marks=marks),
    ]
    losses = table["loss"]
    if np.isfinite(losses).any():
        mean = np.array([np.nan if np.isnan(row).all() else np.nanmean(row) for row in losses])
        line = Curve("mean over ranks", table.steps, mean, "s0")
        charts.append(chart("loss", "Loss", [line], text=digits, from_zero=False))
    return charts


def _lines(steps: np.ndarray, values: Floats, culprits: set[int]) -> list[Curve]:
    """One line per rank, or a band for the many; the culprits last, on top."""
    ranks = values.shape[1]
    others = [rank for rank in range(ranks) if rank not in culprits]
    if ranks <= SINGLE_LINES:
        lines = [Curve(f"rank {rank}", steps, values[:, rank], f"s{rank}") for rank in others]
    else:
        # Steps that no other rank recorded stay NaN: nanquantile would warn of them.
        crowd = values[:, others]
        known = ~np.isnan(crowd).all(axis=1)
        low, middle, high = np.full((3, len(crowd)), np.nan)
        for line, q in ((low, 0.05), (middle, 0.5), (high, 0.95)):
            line[known] = np.nanquantile(crowd[known], q, axis=1)
        lines = [Curve(f"{len(others)} other ranks: median, 5–95%", steps, middle, "crowd", low, high)]
    marked = sorted(culprits)[:MOST_CULPRITS]
    return [*lines, *(Curve(f"rank {rank} (verdict)", steps, values[:, rank], "culprit") for rank in marked)]


def _rank_table(summary: dict[str, Any], culprits: set[int]) -> Markup:
    """Ranks beside those that do the same work; of many, the slowest with its peers first."""
    ranks = mesh_order(summary["ranks"])
    blocks = same_work(ranks)
    if len(ranks) > 2 * SINGLE_LINES:
        slowest = {rank["rank"]: place for place, rank in enumerate(slowest_first(summary, culprits))}
        blocks = [(part, sorted(members, key=lambda rank: slowest[rank["rank"]])) for part, members in blocks]
        blocks.sort(key=lambda block: slowest[block[1][0]["rank"]])
    columns, texts = rank_cells([rank for _, members in blocks for rank in members])
    cells, rows = iter(texts), []
    for part, members in blocks:
        if part:
            words = f"{part}: {counted(len(members), 'rank')}"
            rows.append(fill('<tr class="part"><th scope="rowgroup" colspan="6">{}</th></tr>', words))
        for rank in members:
            name, *where, own, wait, excess = next(cells)
            rows.append(table_row(name, (own, wait, excess), where, culprit=rank["rank"] in culprits))
    note = "Blocks are ranks that do the same work; excess is over the median of those." if len(blocks) > 1 else ""
    kind = "wide mesh" if "place" in columns else "wide"
    return table_figure(kind, "Every rank (medians, whole run)", map(column_head, columns), rows, note)


def _details(summary: dict[str, Any], info: RunInfo) -> Markup:
    sync, comparison = summary["sync"], summary.get("comparison") or {}
    # Which of the buckets the ranks of a host map, and which are copied.
    memory = sync.get("memory") or {}
    buckets = ", ".join(
        f"{memory[f'{kind}_buckets']} {kind} ({size(memory[f'{kind}_bytes'])})"
        for kind in ("shared", "copied")
        if memory.get(f"{kind}_buckets")
    )
    # `ours` and `theirs` are objects: each of their figures is a row. Ratios are their time over ours.
    compared: dict[str, str] = {}
    for key, value in comparison.items():
        if isinstance(value, dict):
            known = {name: one for name, one in value.items() if isinstance(one, int | float | str)}
            compared |= {f"comparison: {key}, {label(name)}": figure(name, one) for name, one in known.items()}
        elif isinstance(value, int | float | str):
            factor = not isinstance(value, str) and key.endswith("_ratio")
            compared[f"comparison: {label(key)}"] = ratio(float(value)) if factor else figure(key, value)
    rows = [
        ("gradients reduced by", sync["engine"] + (f", {sync['algorithm']}" if sync["algorithm"] else "")),
        ("gradient buckets", buckets),
        ("payload per step", size(sync["payload_bytes_per_step"])),
        ("communication per step (median, whole run)", duration(sync["total_seconds_per_step"])),
        ("of which exposed", duration(sync["exposed_seconds_per_step"])),
        *compared.items(),
        ("command", " ".join(info.command)),
        ("versions", ", ".join(f"{name} {version}" for name, version in info.versions.items())),
    ]
    return fill(
        """<section class="details" aria-label="Details"><h2>Figures</h2><dl>{}</dl></section>
<footer>Own time is a rank's work from the end of one synchronisation to its arrival at the next. The cost replays the
recorded own times with the culprit repaired: ranks × (slowest of all − slowest with it repaired), summed over
steps.</footer>""",
        [fill("<dt>{}</dt><dd>{}</dd>", name, value) for name, value in rows if value],
    )


def _end_of(verdict: Verdict) -> int | None:
    """The step that an episode ended at; None while it is not over."""
    until = verdict.evidence.get("until_step")
    return None if until is None else int(until)


def _keep_units(text: str) -> str:
    """Return text with numbers kept on one line with their units, by no-break spaces."""
    return re.sub(r"(?<=\d) (?=%|(?:[mµn]?s|min|h|d)\b)", "\u00a0", text)

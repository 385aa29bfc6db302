"""A run's report as Markdown, for pull requests and job summaries: the verdict first."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

from ringside.monitor.job.questions import read_answers
from ringside.monitor.run.records import RunInfo, summary_notes
from ringside.text import counted, duration, size
from ringside.view.mesh_text import (
    BLOCKED_COLUMNS,
    BLOCKED_NOTE,
    BLOCKED_TITLE,
    blocked_cells,
    chain_line,
    rank_cells,
    read_blocked,
)
from ringside.view.verdict_text import OWN_TIME, as_sentence, checks, describe_calm, slowest_first, verdict_text

SHOWN_RANKS = 16


def render_markdown(summary: dict[str, Any], info: RunInfo) -> str:
    """Return a report in GitHub's Markdown.

    Args:
        summary: The content of `summary.json`.
        info: The content of `run.json`.
    """
    sections = [f"# {escape(info.name)}"]
    verdicts = [verdict_text(content, summary) for content in summary["verdicts"]]
    if not verdicts:
        calm = describe_calm(summary)
        sections.append(f"**{escape(calm.headline)}** {escape(calm.text)}")
    for verdict in verdicts:
        lines = (
            ("When", verdict.when), ("Why", verdict.why), ("Cost", verdict.price), ("Next", verdict.next),
            ("Chain", chain_line(verdict.verdict)),
        )  # fmt: skip
        items = "\n".join(f"- **{name}**: {escape(text)}" for name, text in lines if text)
        sections.append(f"## {escape(verdict.headline)}\n\n{items}")
    sections += [f"*{escape(change)}*" for change in summary_notes(summary)]

    step, sync, overhead = summary["step_seconds"], summary["sync"], summary["overhead"]
    figures = [
        ("steps", str(summary["steps"])),
        ("ranks", f"{info.world_size} on {counted(len(set(info.hosts)) or 1, 'host')}"),
        ("gradients reduced by", sync["engine"] + (f", {sync['algorithm']}" if sync["algorithm"] else "")),
        ("step time, whole run, median / 95th percentile", f"{duration(step['median'])} / {duration(step['p95'])}"),
        ("exposed communication per step, whole run, median", duration(sync["exposed_seconds_per_step"])),
        ("payload per step", size(sync["payload_bytes_per_step"])),
        ("Ringside's overhead per step, whole run, mean", duration(overhead["seconds_per_step"])),
    ]
    sections.append(_table(("figure", "value"), [(name, escape(value)) for name, value in figures]))

    found = checks(read_answers(summary.get("questions")), (text.verdict for text in verdicts)).values()
    if found:
        shown = [f"- {check.mark} **{escape(check.heading)}.** {escape(check.caption)}".rstrip() for check in found]
        sections.append("## Checks\n\n" + "\n".join(shown))

    if blocked := read_blocked(summary):
        dimensions = _table(BLOCKED_COLUMNS, [tuple(map(escape, blocked_cells(one))) for one in blocked])
        sections.append(f"## {BLOCKED_TITLE}\n\n{BLOCKED_NOTE}\n\n{dimensions}")

    ranks = summary["ranks"]
    columns, rows = rank_cells(slowest_first(summary)[:SHOWN_RANKS])
    rest = f"\n\nThe slowest {SHOWN_RANKS} of {len(ranks)} ranks." if len(ranks) > SHOWN_RANKS else ""
    ranked = _table(columns, [[escape(cell) for cell in row] for row in rows])
    sections.append(f"## Ranks (medians, whole run)\n\n{as_sentence(OWN_TIME)}\n\n{ranked}{rest}")
    return "\n\n".join(sections) + "\n"


def escape(text: str) -> str:
    """Return text that Markdown and the HTML in it leave as it is."""
    return html.escape(re.sub(r"([\\`*_\[\]|#])", r"\\\1", " ".join(text.split())), quote=False)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)

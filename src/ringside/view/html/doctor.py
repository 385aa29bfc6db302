"""The doctor's findings as one HTML page that needs nothing else: verdicts first, lanes, rings, tables."""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources
from itertools import groupby

from ringside.doctor.findings import Findings, Lane, Note, Sheet, TimeSpan, Unjudged
from ringside.monitor.verdict import Verdict
from ringside.text import duration, figure, label, title
from ringside.view.findings_text import finding_text, what_if_line
from ringside.view.html.nccl_rings import rings_figure
from ringside.view.tui.console import without_controls
from ringside.view.verdict_text import answers_section

# -------------------------------------------------------------------------------------------------
# Lanes: what every rank did over time, waits marked.

UNITS = 10_000.0
"""Width of a lane in its own coordinates; the page stretches it."""
KINDS = {
    "compute": "compute",
    "communication": "communication",
    "hidden": "communication behind compute",
    "wait": "waiting for others",
    "idle": "idle",
    "missing": "culprit: not there, or stopped",
}
TICKS = 5


def lanes_figure(lanes: Sequence[Lane]) -> str:
    """Return a `<figure>` with one lane per rank; all share their origin and scale."""
    end = max((span.end_s for lane in lanes for span in lane.spans), default=0.0)
    if end <= 0:
        return ""
    present = {span.kind for lane in lanes for span in lane.spans}
    legend = "".join(
        f'<span class="key"><i class="{kind}"></i>{words}</span>' for kind, words in KINDS.items() if kind in present
    )
    rows = "".join(_lane(lane, end) for lane in lanes)
    ticks = "".join(f"<span>{duration(end * tick / TICKS)}</span>" for tick in range(TICKS + 1))
    return f"""<figure class="lanes"><figcaption>{html.escape(lanes[0].title)}</figcaption>
<p class="legend">{legend}</p><div class="rows">{rows}</div><div class="ticks">{ticks}</div></figure>"""


def _lane(lane: Lane, end: float) -> str:
    culprit = lane.note == "culprit"
    bars = "".join(_bar(span, end) for span in lane.spans)
    waits = sum(span.end_s - span.start_s for span in lane.spans if span.kind == "wait")
    said = f"rank {lane.rank}: waited {duration(waits)}" + (", culprit" if culprit else "")
    badge = '<em class="badge">verdict</em>' if culprit else ""
    return f"""<div class="lane{" culprit" if culprit else ""}"><b>{lane.rank}{badge}</b>
<svg viewBox="0 0 {UNITS:.0f} 10" preserveAspectRatio="none" role="img"
 aria-label="{html.escape(said)}">{bars}</svg></div>"""


def _bar(span: TimeSpan, end: float) -> str:
    x = UNITS * max(span.start_s, 0.0) / end
    width = max(UNITS * (span.end_s - span.start_s) / end, 8.0)
    name = html.escape(f"{span.name or KINDS.get(span.kind, span.kind)}, {duration(span.end_s - span.start_s)}")
    kind = span.kind if span.kind in KINDS else "idle"
    return f'<rect class="{kind}" x="{x:.0f}" y="0" width="{width:.0f}" height="10"><title>{name}</title></rect>'


MOST_ROWS = 256
OPEN_FILES = 12


def render_page(findings: Findings) -> str:
    """Return everything that was found as one self-contained page."""
    culprits = {rank for verdict in findings.verdicts for rank in verdict.ranks}
    body = [
        _header(findings),
        _verdicts(findings),
        _what_if(findings),
        answers_section(findings.questions),
        *(lanes_figure(list(group)) for _, group in groupby(findings.lanes, key=lambda lane: lane.title)),
        *(rings_figure(rings, culprits) for rings in findings.rings),
        *(_sheet(sheet) for sheet in findings.sheets if sheet.rows),
        _unjudged(findings.unjudged),
        _files(findings.notes),
    ]
    return without_controls(f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{_title(findings)} · Ringside</title>
<style>{_asset("report.css")}{_asset("doctor.css")}</style></head>
<body><main>{"".join(body)}<footer>Ringside's doctor reads files and runs nothing of them. Culprits are named in
verdicts; ranks that only waited stand under “victims”.</footer></main></body></html>
""")


def _asset(name: str) -> str:
    return resources.files("ringside.view").joinpath(name).read_text(encoding="utf-8")


def _title(findings: Findings) -> str:
    return html.escape(finding_text(findings.verdicts[0]).headline if findings.verdicts else "Nothing wrong was found")


def _header(findings: Findings) -> str:
    used = sum(note.used for note in findings.notes)
    kinds = sorted({note.kind for note in findings.notes if note.used and note.kind})
    read = f"{used} of {len(findings.notes)} file{'' if len(findings.notes) == 1 else 's'} read"
    return f"""<header><p class="brand">Ringside</p><p class="run">the doctor</p>
<p class="meta">{html.escape(" · ".join([read, *kinds]))}</p></header>"""


def _verdicts(findings: Findings) -> str:
    if findings.verdicts:
        return "".join(_verdict(verdict, first=index == 0) for index, verdict in enumerate(findings.verdicts))
    if not any(note.used for note in findings.notes):
        return _no_verdict("open", "?", "Nothing here could be read.", "What each file is, stands below.")
    if findings.unjudged:
        said = "What could not be judged, and why, stands below."
        return _no_verdict("open", "?", "Nothing wrong was found in what could be judged.", said)
    return _no_verdict("well", "✓", "Nothing wrong was found.", "Every file that could be read agrees with that.")


def _no_verdict(kind: str, sign: str, headline: str, said: str) -> str:
    return f"""<section class="verdict {kind}" aria-label="Verdict"><p class="sign">
<span aria-hidden="true">{sign}</span>verdict</p><h1>{headline}</h1><p>{said}</p></section>"""


def _verdict(verdict: Verdict, *, first: bool) -> str:
    told = finding_text(verdict)
    level = "h1" if first else "h2"
    parts = (("Why", told.why), ("Price", told.price), ("Next", told.next))
    rows = "".join(f"<dt>{name}</dt><dd>{html.escape(text)}</dd>" for name, text in parts if text)
    kind = html.escape(label(verdict.kind))
    return f"""<section class="verdict bad" aria-label="Verdict"><p class="sign"><span aria-hidden="true">!</span>
verdict · {kind}</p><{level}>{html.escape(told.headline)}</{level}><dl>{rows}</dl>{_evidence(verdict, opened=first)}
</section>"""


def _evidence(verdict: Verdict, *, opened: bool) -> str:
    cells = "".join(
        f"<div><dt>{html.escape(title(name))}</dt><dd>{html.escape(figure(name, value))}</dd></div>"
        for name, value in verdict.evidence.items()
        if value != ""
    )
    state = " open" if opened else ""
    return f'<details class="evidence"{state}><summary>Evidence</summary><dl>{cells}</dl></details>' if cells else ""


def _what_if(findings: Findings) -> str:
    if not findings.what_if:
        return ""
    known = {key: value for key, value in findings.what_if.items() if isinstance(value, int | float)}
    cells = "".join(
        f"<div><dt>{html.escape(title(key))}</dt><dd>{html.escape(figure(key, value))}</dd></div>"
        for key, value in known.items()
    )
    source = str(findings.what_if.get("source", ""))
    more = [f"{one.get('source', 'another job')}: {what_if_line(one)}." for one in findings.more_what_if]
    notes = "".join(
        f'<p class="note">{html.escape(line)}</p>' for line in [source and f"Replayed: {source}.", *more] if line
    )
    return f"""<section class="details" aria-label="What if"><h2>What if nobody had been slower than its peers</h2>
<dl class="tiles">{cells}</dl>{notes}</section>"""


def _sheet(sheet: Sheet) -> str:
    marked = set(sheet.culprits)
    order = sorted(range(len(sheet.rows)), key=lambda row: row not in marked) if len(sheet.rows) > 16 else None
    shown = (order if order is not None else list(range(len(sheet.rows))))[:MOST_ROWS]
    text = [
        any(isinstance(row[column], str) for row in sheet.rows if column < len(row))
        for column in range(len(sheet.columns))
    ]
    head = "".join(
        f'<th scope="col"{_left(text[column])}>{html.escape(title(name))}</th>'
        for column, name in enumerate(sheet.columns)
    )
    rows = "".join(_row(sheet, row, text, culprit=row in marked) for row in shown)
    left_out = len(sheet.rows) - len(shown)
    notes = [sheet.note, f"{left_out} more rows are in --json." if left_out else ""]
    note = f'<p class="note">{html.escape(" ".join(filter(None, notes)))}</p>' if any(notes) else ""
    return f"""<figure class="wide sheet"><figcaption>{html.escape(sheet.title)}</figcaption>{note}<div class="scroll">
<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></figure>"""


def _row(sheet: Sheet, row: int, text: Sequence[bool], *, culprit: bool) -> str:
    cells = "".join(
        f"<td{_left(text[column])}>{html.escape(figure(sheet.columns[column], value))}</td>"
        for column, value in enumerate(sheet.rows[row][: len(sheet.columns)])
    )
    return f"<tr{' class=culprit' if culprit else ''}>{cells}</tr>"


def _left(text: bool) -> str:
    return ' class="text"' if text else ""


def _unjudged(lines: Sequence[Unjudged]) -> str:
    if not lines:
        return ""
    rows = "".join(f"<dt>{html.escape(line.what)}</dt><dd>{html.escape(line.why)}</dd>" for line in lines)
    return f"""<section class="details" aria-label="Not judged"><h2>What could not be judged, and why</h2>
<dl>{rows}</dl></section>"""


def _files(notes: Sequence[Note]) -> str:
    rows = "".join(
        f'<li class="{"used" if note.used else "left"}"><span aria-hidden="true">{"✓" if note.used else "✗"}</span>'
        f"<div><b>{html.escape(note.file)}</b> <small>{html.escape(note.kind)}</small><p>{html.escape(note.text)}</p>"
        "</div></li>"
        for note in sorted(notes, key=lambda note: note.used)
    )
    state = " open" if len(notes) <= OPEN_FILES else ""
    return f"""<section class="details" aria-label="Files"><details{state}><summary><h2>{len(notes)}
file{"" if len(notes) == 1 else "s"}</h2></summary><ul class="files">{rows}</ul></details></section>"""

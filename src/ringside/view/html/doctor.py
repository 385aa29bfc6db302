"""The doctor's findings as one HTML page that needs nothing else: verdicts first, lanes, rings, tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ringside.doctor.findings import Findings, Lane, Note, Sheet, is_enough_to_judge, overall_headline
from ringside.text import duration, figure, label, title
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.html.page import checks_section, figures, note_line, render_page, table_figure, verdict_section
from ringside.view.html.rings import rings_figure
from ringside.view.verdict_text import finding_text, what_if_line

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
TICKS = 4  # even: on phones every second label is hidden, and the last one has to stay
MOST_ROWS = 256
OPEN_FILES = 12
_OPEN = Markup(" open")


def doctor_page(findings: Findings) -> str:
    """Return everything that was found as one self-contained page."""
    culprits = {rank for verdict in findings.verdicts for rank in verdict.ranks}
    unjudged = NOTHING
    if findings.unjudged:
        unjudged = fill(
            """<section class="details" aria-label="Not judged"><h2>What could not be judged, and why</h2>
<dl>{}</dl></section>""",
            [fill("<dt>{}</dt><dd>{}</dd>", line.what, line.why) for line in findings.unjudged],
        )
    what_if = NOTHING
    if findings.what_if:
        known = {key: value for key, value in findings.what_if.items() if isinstance(value, int | float)}
        source = str(findings.what_if.get("source", ""))
        lines = [f"Replayed: {source}."] if source else []
        lines += [f"{other.get('source', 'another job')}: {what_if_line(other)}." for other in findings.more_what_if]
        what_if = fill(
            """<section class="details" aria-label="What if"><h2>Without stragglers</h2>
<dl class="tiles">{}</dl>{}</section>""",
            figures(known),
            map(note_line, lines),
        )
    sections = [
        *_verdict_sections(findings),
        what_if,
        checks_section(findings.questions, findings.verdicts),
        *(lanes_figure(list(group)) for _, group in groupby(findings.lanes, key=lambda lane: lane.title)),
        *(rings_figure(rings, culprits) for rings in findings.rings),
        *(_sheet_table(sheet) for sheet in (*findings.standings, *findings.sheets) if sheet.rows),
        unjudged,
        _files_section(findings.notes),
        Markup(
            """<footer>Ringside's doctor reads files and runs nothing of them. Culprits are named in
verdicts; ranks that only waited stand under “victims”.</footer>"""
        ),
    ]
    headline = overall_headline(findings) or finding_text(findings.verdicts[0]).headline
    files = len(findings.notes)
    read = f"{sum(note.used for note in findings.notes)} of {files} file{'' if files == 1 else 's'} read"
    kinds = sorted({note.kind for note in findings.notes if note.used and note.kind})
    return render_page(
        headline, "the doctor", " · ".join([read, *kinds]), sections, styles=("report.css", "doctor.css")
    )


def _verdict_sections(findings: Findings) -> list[Markup]:
    sections = []
    if findings.verdicts and (headline := overall_headline(findings)):
        sections.append(verdict_section("verdicts", headline, kind="bad"))
    for index, verdict in enumerate(findings.verdicts):
        text = finding_text(verdict)
        cells = figures({name: value for name, value in verdict.evidence.items() if value != ""})
        evidence = '<details class="evidence"{}><summary>Evidence</summary><dl>{}</dl></details>'
        sections.append(
            verdict_section(
                f"\nverdict · {label(verdict.kind)}",
                text.headline,
                [("Why", text.why), ("Cost", text.price), ("Next", text.next)],
                kind="bad",
                level=2 if sections else 1,
                more=fill(evidence, NOTHING if index else _OPEN, cells) if cells else NOTHING,
            )
        )
    if sections:
        return sections
    # Without a verdict: how far that can be trusted.
    kind, mark = "open", "?"
    if not any(note.used for note in findings.notes):
        why = "See below what each file is."
    elif not is_enough_to_judge(findings):
        why = "See below what could not be judged, and why."
    else:
        kind, mark = "well", "✓"
        why = "Every file that could be read agrees with that."
    return [verdict_section("verdict", overall_headline(findings), kind=kind, mark=mark, text=fill("<p>{}</p>", why))]


# -------------------------------------------------------------------------------------------------
# Lanes: what every rank did over time, waits marked.


def lanes_figure(lanes: Sequence[Lane]) -> Markup:
    """Return a `<figure>` with one lane per rank; all share their origin and scale."""
    end = max((span.end_s for lane in lanes for span in lane.spans), default=0.0)
    if end <= 0:
        return NOTHING
    present = {span.kind for lane in lanes for span in lane.spans}
    rows = []
    for lane in lanes:
        culprit = lane.note == "culprit"
        waits = sum(span.end_s - span.start_s for span in lane.spans if span.kind == "wait")
        # A span is never narrower than can be seen, whatever its kind.
        bars = [
            fill(
                '<rect class="{}" x="{:.0f}" y="0" width="{:.0f}" height="10"><title>{}, {}</title></rect>',
                span.kind if span.kind in KINDS else "idle",
                UNITS * max(span.start_s, 0.0) / end,
                max(UNITS * (span.end_s - span.start_s) / end, 8.0),
                span.name or KINDS.get(span.kind, span.kind),
                duration(span.end_s - span.start_s),
            )
            for span in lane.spans
        ]
        rows.append(
            fill(
                """<div class="lane{culprit}"><b>{rank}{badge}</b>
<svg viewBox="0 0 {units:.0f} 10" preserveAspectRatio="none" role="img"
 aria-label="{label}">{bars}</svg></div>""",
                culprit=" culprit" if culprit else "",
                rank=lane.rank,
                badge=Markup('<em class="badge">verdict</em>') if culprit else NOTHING,
                units=UNITS,
                label=f"rank {lane.rank}: waited {duration(waits)}" + (", culprit" if culprit else ""),
                bars=bars,
            )
        )
    return fill(
        """<figure class="lanes"><figcaption>{title}</figcaption>
<p class="legend">{legend}</p><div class="rows">{rows}</div><div class="ticks">{ticks}</div></figure>""",
        title=lanes[0].title[:1].upper() + lanes[0].title[1:],
        legend=[
            fill('<span class="key"><i class="{}"></i>{}</span>', kind, text)
            for kind, text in KINDS.items()
            if kind in present
        ]
        + [fill('<span class="key">time since the first moment shown</span>')],
        rows=rows,
        ticks=[fill("<span>{}</span>", duration(end * tick / TICKS)) for tick in range(TICKS + 1)],
    )


# -------------------------------------------------------------------------------------------------
# Tables, and what was not judged.


def _sheet_table(sheet: Sheet) -> Markup:
    marked = set(sheet.culprits)
    # Of a long table the culprits' rows come first: the end is cut off.
    order = sorted(range(len(sheet.rows)), key=lambda row: row not in marked and len(sheet.rows) > 16)[:MOST_ROWS]
    # Texts are aligned to the left, numbers to the right.
    classes = [
        Markup(' class="text"')
        if any(isinstance(row[column], str) for row in sheet.rows if column < len(row))
        else NOTHING
        for column in range(len(sheet.columns))
    ]
    heads = [
        fill('<th scope="col"{}>{}</th>', kind, title(name)) for kind, name in zip(classes, sheet.columns, strict=True)
    ]
    rows = []
    for row in order:
        cells = [
            fill("<td{}>{}</td>", kind, figure(name, value))
            for kind, name, value in zip(classes, sheet.columns, sheet.rows[row])  # noqa: B905 - rows may be shorter
        ]
        rows.append(fill("<tr{}>{}</tr>", Markup(" class=culprit") if row in marked else NOTHING, cells))
    left_out = len(sheet.rows) - len(order)
    notes = [sheet.note, f"{left_out} more rows are in --json." if left_out else ""]
    return table_figure("wide sheet", sheet.title, heads, rows, " ".join(filter(None, notes)))


def _files_section(notes: Sequence[Note]) -> Markup:
    rows = [
        fill(
            '<li class="{kind}"><span aria-hidden="true">{mark}</span>'
            "<div><b>{file}</b> <small>{reader}</small><p>{text}</p></div></li>",
            kind="used" if note.used else "left",
            mark="✓" if note.used else "✗",
            file=note.file,
            reader=note.kind,
            text=note.text,
        )
        for note in sorted(notes, key=lambda note: note.used)
    ]
    return fill(
        """<section class="details" aria-label="Files"><details{}><summary><h2>{}
file{}</h2></summary><ul class="files">{}</ul></details></section>""",
        _OPEN if len(notes) <= OPEN_FILES else NOTHING,
        len(notes),
        "" if len(notes) == 1 else "s",
        rows,
    )

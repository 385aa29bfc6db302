"""The shell of every page that is one self-contained file, and the sections that several of them have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ringside.monitor.job.questions import Question
from ringside.monitor.verdict import Verdict
from ringside.text import Number, figure, title
from ringside.view import read_asset
from ringside.view.html.markup import NOTHING, Markup, fill
from ringside.view.tui.console import without_controls
from ringside.view.verdict_text import checks

LONG_TEXT = 64
"""A longer figure has a line of its own."""
PREDICTION_STYLES = ("report.css", "doctor.css", "predict.css")


def render_page(
    title: str,
    subject: str,
    meta: str,
    sections: Iterable[Markup],
    *,
    styles: Sequence[str] = PREDICTION_STYLES,
    scripts: Sequence[str] = (),
) -> str:
    """Return a whole page that needs no other file.

    Args:
        title: Of the window.
        subject: What the page is about, beside the brand.
        meta: In small letters on the right.
        sections: Its body.
        styles: Style sheets of `static/`, in the order in which they override one another.
        scripts: Scripts of `static/`.
    """
    page = fill(
        """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title} · Ringside</title><style>{styles}</style></head>
<body><main><header><p class="brand">Ringside</p><p class="run">{subject}</p>
<p class="meta">{meta}</p></header>{sections}</main>{scripts}</body></html>
""",
        title=title,
        subject=subject,
        meta=meta,
        sections=sections,
        # The package's own files stand as they are.
        styles=[Markup(read_asset(name)) for name in styles],
        scripts=fill("<script>{}</script>", [Markup(read_asset(name)) for name in scripts]) if scripts else NOTHING,
    )
    return without_controls(page)


def verdict_section(
    sign: str,
    headline: str,
    lines: Iterable[tuple[str, str]] = (),
    *,
    kind: str = "open",
    mark: str = "",
    level: int = 1,
    text: Markup = NOTHING,
    more: Markup = NOTHING,
) -> Markup:
    """Return the section that a page begins with: its verdict.

    Args:
        sign: Above the headline, such as `what if`.
        headline: One sentence.
        lines: Names and texts below it; lines without a text are left out.
        kind: `well`, `bad` or `open`: its colour.
        mark: Beside the sign; by its kind where it is empty.
        level: Of the headline: 1 for the first verdict of a page, 2 for others.
        text: A paragraph between headline and lines.
        more: Below the lines.
    """
    rows = [fill("<dt>{}</dt><dd>{}</dd>", name, line) for name, line in lines if line]
    return fill(
        """<section class="verdict {kind}" aria-label="Verdict"><p class="sign">"""
        """<span aria-hidden="true">{mark}</span>{sign}</p><h{level}>{headline}</h{level}>{text}
{lines}{more}</section>""",
        kind=kind,
        mark=mark or {"well": "✓", "bad": "!"}.get(kind, "="),
        sign=sign,
        level=level,
        headline=headline,
        text=text,
        lines=fill("<dl>{}</dl>", rows) if rows else NOTHING,
        more=more,
    )


def tiles(cells: Iterable[tuple[str, str, str]]) -> Markup:
    """Return figures: name, value, and what stands beside it in small letters."""
    shown = [
        fill("<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>", name, value, more) for name, value, more in cells
    ]
    return fill('<dl class="tiles">{}</dl>', shown)


def figures(values: Mapping[str, Number]) -> list[Markup]:
    """Return a name and a formatted value for each entry of a verdict's evidence or of a what-if."""
    shown = []
    for name, value in values.items():
        text = figure(name, value)
        kind = Markup(' class="long"') if len(text) > LONG_TEXT else NOTHING
        shown.append(fill("<div{}><dt>{}</dt><dd>{}</dd></div>", kind, title(name), text))
    return shown


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "", kind: str = "wide prices"
) -> Markup:
    """Return a table of texts; the first column is its heading."""
    return table_figure(kind, title, map(column_head, columns), [table_row(name, cells) for name, *cells in rows], note)


def table_row(name: str, cells: Iterable[str], texts: Iterable[str] = (), *, culprit: bool = False) -> Markup:
    """Return a row of a table: its heading, texts, and figures; a badge where a verdict names it."""
    return fill(
        '<tr{mark}><th scope="row">{name}{badge}</th>{texts}{cells}</tr>',
        mark=Markup(' class="culprit"' if culprit else ""),
        name=name,
        badge=Markup(' <span class="badge">verdict</span>' if culprit else ""),
        texts=[fill('<td class="text">{}</td>', text) for text in texts],
        cells=[fill("<td>{}</td>", cell) for cell in cells],
    )


def table_figure(kind: str, title: str, heads: Iterable[Markup], rows: Iterable[Markup], note: str = "") -> Markup:
    """Return a table of finished cells with its caption and a note; wide ones scroll.

    Args:
        kind: CSS classes of the figure.
        title: The caption.
        heads: Its `<th>` elements.
        rows: Its `<tr>` elements.
        note: Above the table.
    """
    return fill(
        """<figure class="{kind}"><figcaption>{title}</figcaption>{note}<div class="scroll">
<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></figure>""",
        kind=kind,
        title=title,
        note=note_line(note),
        heads=heads,
        rows=rows,
    )


def column_head(name: str) -> Markup:
    """Return the head of a column."""
    return fill('<th scope="col">{}</th>', name)


def note_line(text: str) -> Markup:
    """Return a note; nothing where there is no text."""
    return fill('<p class="note">{}</p>', text) if text else NOTHING


def footer(text: str) -> Markup:
    """Return what a page ends with."""
    return fill("<footer>{}</footer>", text)


def checks_section(answers: Mapping[str, Question], verdicts: Iterable[Verdict] = ()) -> Markup:
    """Return the questions of a profile as a section of checks; empty if none was put.

    Args:
        answers: By their names in `QUESTIONS`.
        verdicts: What was found.
    """
    marks = {"✓": ("well", "passed"), "!": ("bad", "failed"), "?": ("open", "not judged")}
    rows = []
    for check in checks(answers, verdicts).values():
        kind, spoken = marks[check.mark]
        rows.append(
            fill(
                '<li class="{kind}"><b title="{spoken}">{mark}</b><div><h3>{heading}</h3>'
                '<p class="words">{caption}</p></div></li>',
                kind=kind,
                spoken=spoken,
                mark=check.mark,
                heading=check.heading,
                caption=check.caption,
            )
        )
    if not rows:
        return NOTHING
    return fill(
        """<section class="details" aria-label="Checks"><h2>Checks</h2>
<ul class="questions">{}</ul></section>""",
        rows,
    )

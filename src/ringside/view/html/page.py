"""What the predictor's pages have in common: one self-contained file each, in the report's style."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ringside.view.schedule.svg import asset
from ringside.view.tui.console import without_controls

CSS = ("report.css", "doctor.css", "predict.css")


def page(title: str, what: str, body: Iterable[str], *, meta: str = "", css: Sequence[str] = (), js: str = "") -> str:
    """Return a whole page.

    Args:
        title: Of the window.
        what: What the page is, beside the brand.
        body: Its sections, HTML.
        meta: In small letters on the right.
        css: Further style sheets of this package, before the predictor's own.
        js: Its script.
    """
    styles = "".join(asset(name) for name in (*css, *CSS))
    return without_controls(f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{html.escape(title)} · Ringside</title><style>{styles}</style>
</head><body><main><header><p class="brand">Ringside</p><p class="run">{html.escape(what)}</p>
<p class="meta">{html.escape(meta)}</p></header>{"".join(body)}</main><script>{js}</script></body></html>
""")


def verdict(sign: str, headline: str, lines: Iterable[tuple[str, str]], kind: str = "open") -> str:
    """Return what is to be known first.

    Args:
        sign: Above the headline, such as `what if`.
        headline: One sentence.
        lines: Names and texts below it.
        kind: `well`, `bad` or `open`: its colour.
    """
    mark = {"well": "✓", "bad": "!"}.get(kind, "=")
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd>" for name, text in lines if text)
    return f"""<section class="verdict {kind}" aria-label="Verdict">
<p class="sign"><span aria-hidden="true">{mark}</span>{html.escape(sign)}</p>
<h1>{html.escape(headline)}</h1><dl>{rows}</dl></section>"""


def tiles(cells: Iterable[tuple[str, str, str]]) -> str:
    """Return figures: name, value, and what is to be said beside it."""
    shown = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(more)}</small></dd></div>"
        for name, value, more in cells
    )
    return f'<dl class="tiles">{shown}</dl>'


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """Return a table of texts; the first column is its heading."""
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns)
    body = "".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    said = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"""<figure class="wide prices"><figcaption>{html.escape(title)}</figcaption>{said}<div class="scroll">
<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></figure>"""


def footer(text: str) -> str:
    """Return what is to be known last."""
    return f"<footer>{html.escape(text)}</footer>"

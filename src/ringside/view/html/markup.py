"""HTML whose texts are escaped because there is no other way to put them in.

`fill` is `str.format` for templates that stand in the source: every text that it inserts is escaped, only what is
`Markup` already stands as it is. A page takes `Markup` alone, so a text that nobody escaped cannot reach one.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import TypeAlias


class Markup(str):
    """HTML as it stands in a page. Made by `fill` and `embed_json`; directly only of text in the source."""

    __slots__ = ()


Value: TypeAlias = "str | float | Iterable[Markup] | None"
"""What a template may hold: text, which is escaped; a number; nothing; HTML, or several pieces of it."""

NOTHING = Markup()


def fill(template: str, *values: Value, **named: Value) -> Markup:
    """Return a template with its fields filled in, as `str.format` fills them; texts are escaped.

    Args:
        template: HTML as it stands in the source, never put together from texts.
        values: For its `{}`.
        named: For its `{name}`; numbers may have a format, `{x:.1f}`.
    """
    # The class is compared exactly: neither str nor a subclass other than Markup passes for HTML.
    return Markup(template.format(*map(_as_html, values), **{name: _as_html(value) for name, value in named.items()}))


def embed_json(data: object) -> Markup:
    """Return JSON that is safe inside a `<script>` element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _as_html(value: Value) -> str | float:
    if type(value) is Markup or isinstance(value, int | float):
        return value
    if value is None:
        return ""
    return html.escape(value) if isinstance(value, str) else "".join(value)

"""A hook of mkdocs.yml: links from pages to files outside docs/, which the site does not hold.

In the repository such a link leads to the file. The site shows its words; where the repository will be is not known.
"""

from __future__ import annotations

import re
from typing import Any

_LINK_OUT = re.compile(r"(?<!!)\[([^\]]*)\]\((?:\.\./)+(?!docs/)[^)\s]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return a page without its links to files that are not on the site."""
    leaves = "../" * (page.file.src_uri.count("/") + 1)  # so many steps lead out of docs/
    return _LINK_OUT.sub(lambda found: found[1] if f"]({leaves}" in found[0] else found[0], markdown)

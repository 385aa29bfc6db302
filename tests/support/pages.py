"""Pages of Markdown, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path


def anchors(page: Path) -> set[str]:
    """Return the places in a page that a link can lead to, as GitHub names them."""
    text = page.read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    named = {
        re.sub(r"[^\w\- ]", "", re.sub(r"<[^>]*>", "", title)).strip().lower().replace(" ", "-") for title in titles
    }
    return named | set(re.findall(r'<a id="([\w-]+)">', text))

"""Golden files: text that was right once, compared line by line; `pytest --write-golden` writes it anew."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN_LINES = 80
"""Of a difference: a file that is other altogether is looked at with `git diff` after writing it anew."""


class Golden:
    """Compares text with files of one directory.

    Args:
        directory: Where the files lie.
        write: Whether to write them instead.
    """

    def __init__(self, directory: Path, *, write: bool) -> None:
        self.directory, self._write = directory, write

    def check(self, name: str, text: str) -> None:
        """Fail, with a unified diff, where a file is missing or says anything else than `text`."""
        path = self.directory / name
        if self._write:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if not path.exists():
            pytest.fail(f"{path} is missing: look at what `pytest --write-golden` writes there", pytrace=False)
        kept = path.read_text()
        if kept == text:
            return
        names = str(path), "what there is now"
        lines = list(difflib.unified_diff(kept.splitlines(), text.splitlines(), *names, lineterm="", n=1))
        more = f"\n... and {len(lines) - SHOWN_LINES} more lines" if len(lines) > SHOWN_LINES else ""
        pytest.fail(
            "not as it was; where it should be so: pytest --write-golden\n" + "\n".join(lines[:SHOWN_LINES]) + more,
            pytrace=False,
        )


def rounded(value: Any, digits: int = 4) -> Any:
    """Return a JSON value with every fraction to a few significant digits: the last ones differ among processors."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def keys_of(content: Any) -> str:
    """Return every key of a JSON value with the types it has, a line each; elements of a list count as one."""
    found: dict[str, set[str]] = {}
    for path, kind in _walk(content, ""):
        found.setdefault(path, set()).add(kind)
    return "".join(f"{path or '.'}: {' | '.join(sorted(kinds))}\n" for path, kinds in found.items())


def _walk(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        yield path, "object"
        for key, item in value.items():
            yield from _walk(item, f"{path}.{key}")
    elif isinstance(value, list):
        yield path, "list"
        for item in value:
            yield from _walk(item, f"{path}[]")
    else:
        yield path, {bool: "boolean", str: "string", type(None): "null"}.get(type(value), "number")


def broken_up(page: str) -> str:
    """Return HTML or SVG with a line for every element, so that a difference can be read."""
    text = re.sub(r"(?<=>)(?=<)", "\n", page)
    return re.sub(r"(?<=[\]}],)(?=[\[{])", "\n", text).rstrip() + "\n"  # lists inside of a page's data


def without_own_files(page: str) -> str:
    """Return a page, a line for every element, without the styles and scripts that lie in the package as they are."""
    for path in sorted((ROOT / "src" / "ringside").rglob("*.*")):
        if path.suffix in (".css", ".js"):
            page = page.replace(path.read_text().strip(), f"/* {path.name} */")
    return broken_up(page)

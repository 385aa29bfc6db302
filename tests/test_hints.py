"""Every `pip install` in code, docs and tests: our distribution by its name, real extras, no promise of an index."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KINDS = {".py", ".md", ".yaml", ".yml", ".toml", ".cpp", ".sh", ".sbatch", ".txt", ""}
SWITCH = ROOT / "docs" / "install.md"
"""The one page that may name an index, by the line that a release switches on (docs/release.md)."""
WORD = r"(?:'[^']*'|[^\s`\"'),;:|&<]+)"


def files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return [path for path in paths if path.suffix in KINDS and path.is_file() and path != Path(__file__).resolve()]


@cache
def hints() -> list[tuple[str, list[str]]]:
    """Return where each `pip install` stands, and its words up to the end of its line, quotation or sentence."""
    found = []
    for path in files():
        for line in path.read_text(errors="replace").splitlines():
            for hint in re.findall(rf"pip install ({WORD}(?: {WORD})*)", line):
                found.append((str(path.relative_to(ROOT)), shlex.split(hint.replace("\\", ""))))
    return found


@pytest.fixture(autouse=True)
def listed() -> None:
    if not hints():
        pytest.skip("git lists no files here: this is no clone")


def test_hints_are_found() -> None:
    places = {place for place, _ in hints()}
    assert {"src/ringside/commands/top.py", "docs/serve.md", "Makefile", "docs/install.md"} <= places


def test_nobody_is_told_to_install_the_other_package() -> None:
    assert [hint for hint in hints() if any(re.fullmatch(r"ringside(\W.*)?", word) for word in hint[1])] == []


def test_extras_that_hints_name_exist() -> None:
    extras = set(PROJECT["optional-dependencies"])
    for place, words in hints():
        for word in words:
            if found := re.fullmatch(r"(?:torch-ringside|\.)\[([\w,]+)\]", word):
                assert set(found[1].split(",")) <= extras, (place, word)


def test_no_page_promises_an_index_but_by_the_line_of_the_switch() -> None:
    """With an extra, pip finds the package that is installed already, and asks the index for what is missing only."""
    assert {place for place, words in hints() if "torch-ringside" in words} <= {"docs/install.md", "docs/release.md"}
    page = SWITCH.read_text()
    if "<!-- once published:" in page:
        assert "pip install torch-ringside" not in re.sub(r"<!--.*?-->", "", page, flags=re.DOTALL)


def test_the_package_has_one_name_and_its_command_another() -> None:
    assert PROJECT["name"] == "torch-ringside"
    assert PROJECT["scripts"] == {"ringside": "ringside.commands:main"}

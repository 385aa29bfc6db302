"""Beside the code: workflows call targets that exist, the reference lists every public name, links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from docs.generate.site import on_page_markdown

import ringside

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
PAGES = [ROOT / name for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")]


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"], ids=lambda path: path.name
)
def test_make_targets_exist(path: Path) -> None:
    text = re.sub(r"#(?: .*)$", "", path.read_text(), flags=re.MULTILINE)
    called = re.findall(r"(?:run: |`|^)make ([a-z-]+)", text, re.MULTILINE)
    assert set(called) - {"help"} <= TARGETS


def test_workflows_try_every_python_that_the_package_claims() -> None:
    listed = re.search(r"python: \[(.*)\]", (ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert listed is not None
    claimed = re.findall(r"Python :: (3\.\d+)", " ".join(PYPROJECT["project"]["classifiers"]))
    assert re.findall(r"[\d.]+", listed[1]) == claimed


def test_workflows_may_write_nothing_but_for_publishing() -> None:
    for path in WORKFLOWS:
        text = path.read_text()
        assert "\npermissions:\n  contents: read\n" in text
        assert "secrets." not in text
        assert set(re.findall(r"^ +(\S+): write$", text, re.MULTILINE)) <= {"id-token"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s#]+)", page.read_text()):
        assert (ROOT / target).exists(), target


def test_the_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: ringside\.(\w+)$", (ROOT / "docs" / "python-api.md").read_text(), re.MULTILINE)
    packages = set(re.findall(r"`ringside\.(\w+)`(?: \||\n)", (ROOT / "docs" / "api.md").read_text()))
    assert {"fsdp", "notebook", "schedule", "lab"} <= packages
    assert sorted(listed) == sorted({*ringside.__all__, *packages})


def test_the_site_lists_every_page() -> None:
    shelves = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(shelves) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_site_keeps_links_among_its_pages_only() -> None:
    class Page:
        class file:
            src_uri = "design/0001-schedules.md"

    text = "[a](../verdicts.md), [b](../../ARCHITECTURE.md), ![c](../images/ring-4.svg)"
    assert on_page_markdown(text, page=Page) == "[a](../verdicts.md), b, ![c](../images/ring-4.svg)"


def test_extras_are_what_all_says() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(re.findall(r"[a-z]+", everything.split("[")[1])) == set(extras) - {"all", "torch", "integrations"}

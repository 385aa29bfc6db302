"""Beside the code: workflows call targets that exist, the reference lists every public name, links lead somewhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from docs.generate.site import on_page_markdown
from tests.support.pages import anchors

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


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_steps_of_workflows_are_targets_that_run_here_too(path: Path) -> None:
    steps = re.findall(r"^ +(?:- )?run: (.*)$", path.read_text(), re.MULTILINE)
    assert steps
    assert [step for step in steps if step.removeprefix("make ") not in TARGETS] == []


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
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, place = target.partition("#")
        assert (ROOT / name).exists(), target
        assert not place or place in anchors(ROOT / name if name else page), target


def test_the_reference_lists_every_public_name() -> None:
    listed = re.findall(r"^::: ringside\.(\w+)$", (ROOT / "docs" / "python-api.md").read_text(), re.MULTILINE)
    packages = set(re.findall(r"`ringside\.(\w+)`(?: \||\n)", (ROOT / "docs" / "api.md").read_text()))
    assert {"fsdp", "notebook", "schedule", "lab"} <= packages
    assert sorted(listed) == sorted({*ringside.__all__, *packages})


def test_site_and_index_put_every_page_on_the_same_of_four_shelves() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    index = (ROOT / "docs" / "README.md").read_text()
    site = shelves(nav, r"^  - ([\w-]+):$", r"([\w-]+\.md)$")
    assert list(site) == ["Tutorial", "How-to", "Reference", "Explanation"]
    assert shelves(index, r"^## ([\w-]+).*$", r"\]\(([\w-]+\.md)\)") == site
    listed = sorted(page for pages in site.values() for page in pages)
    assert [*listed, "README.md"] == sorted((page.name for page in (ROOT / "docs").glob("*.md")), key=str.swapcase)


def shelves(text: str, heading: str, page: str) -> dict[str, set[str]]:
    """Return the pages that are named below each heading."""
    _, *parts = re.split(heading, text, flags=re.MULTILINE)
    named = [set(re.findall(page, part, re.MULTILINE)) for part in parts[1::2]]
    return dict(zip(parts[::2], named, strict=True))


def test_a_warning_fails_the_site() -> None:
    """With -q, mkdocs neither shows warnings nor counts them, and --strict has no effect."""
    (build,) = re.findall(r"mkdocs build (.*)", (ROOT / "Makefile").read_text())
    assert "--strict" in build
    assert "-q" not in build.split()


def test_the_site_keeps_links_among_its_pages_only() -> None:
    class Page:
        class file:
            src_uri = "design/0001-schedules.md"

    text = "[a](../verdicts.md), [b](../../ARCHITECTURE.md), ![c](../images/ring-4.svg)"
    assert on_page_markdown(text, page=Page) == "[a](../verdicts.md), b, ![c](../images/ring-4.svg)"


def test_extras_are_what_all_says() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    (everything,) = extras["all"]
    assert set(re.findall(r"[a-z]+", everything.split("[")[1])) == set(extras) - {
        "all",
        "presets",
        "torch",
        "integrations",
    }


def test_the_page_of_installation_says_what_is_declared() -> None:
    """Extras and what they install, versions that are required and that were tested, the file that is built."""
    project, page = PYPROJECT["project"], (ROOT / "docs" / "install.md").read_text()
    extras = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    everything = extras.pop("all")
    declared = {
        name: ", ".join(re.split(r"[>=<]", requirement)[0] for requirement in requirements)
        for name, requirements in project["optional-dependencies"].items()
        if name != "all"
    }
    assert extras == declared
    assert everything == "the next six"
    assert set(list(extras)[:6]) == set(declared) - {"presets", "torch", "integrations"}

    python, torch = project["requires-python"].removeprefix(">="), project["optional-dependencies"]["torch"][0][7:]
    required = f"Linux, Python {python} or newer, torch {torch} or newer."
    assert required in page
    assert required in (ROOT / "README.md").read_text()
    assert f"dist/torch_ringside-{project['version']}-*.whl" in page

    tested = page.split("## What was tested")[1].split("\n## ")[0]
    built_with = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert built_with is not None
    assert f"torch {built_with[1]}, x86-64 | all tests | CI" in tested
    assert f"'torch=={torch}.*'" in (ROOT / "Makefile").read_text()
    assert f"torch {torch}, x86-64 | `attach`, `Communicator` | `make test-oldest`" in tested
    for version in re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"])):
        assert re.search(rf"\b{re.escape(version)}\b", tested), version

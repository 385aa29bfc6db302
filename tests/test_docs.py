"""What the pages under docs/ say of the code: links, commands, kinds of verdicts, environment variables, ports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs.generate.environment import FOR_LAUNCHERS, FOR_USERS, environment_page
from tests.support.pages import anchors, parse

from ringside.commands.serve import PORT
from ringside.engine.settings import Settings
from ringside.monitor.verdict import KINDS, Verdict, headline

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SOURCES = [path.read_text() for end in ("py", "cpp") for path in (ROOT / "src" / "ringside").rglob(f"*.{end}")]
VERDICTS = (DOCS / "verdicts.md").read_text()
OPERATIONS = (DOCS / "operations.md").read_text()
EXCESS = {"changed": 0.25, "stage_imbalance": 0.3, "slow_rank": 0.12, "uneven_work": 0.4, "input_bound": 0.25}
WHO = {
    "stage_imbalance": [],
    "slow_link": [2, 5],
    "broken_ring": [3, 4],
    "communication_bound": [],
    "small_collectives": [],
}


@pytest.mark.parametrize("page", [*PAGES, *sorted(DOCS.glob("design/*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        name, _, place = target.partition("#")
        leads_to = (page.parent / name).resolve() if name else page
        assert leads_to.exists(), target
        assert not place or place in anchors(leads_to), target


def test_the_index_lists_every_page() -> None:
    listed = set(re.findall(r"\]\((\w[\w-]*\.md)\)", (DOCS / "README.md").read_text()))
    assert listed == {page.name for page in PAGES} - {"README.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_parse(page: Path) -> None:
    made = page.name == "commands.md"  # holds examples of parsers' own
    for command in [] if made else re.findall(r"^\$ (?:\w+=\S+ )*(ringside .*)$", page.read_text(), re.MULTILINE):
        parse(command)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_verdict_has_its_section(kind: str) -> None:
    section = VERDICTS.split(f'## <a id="{kind}"></a>{kind}\n')[1].split("\n## ")[0]
    labels = re.findall(r"^\*\*([^*]+)\.\*\*", section, re.MULTILINE)
    assert labels == ["Means", "How we know", "False positives", "What to do"]
    shown = Verdict(
        kind=kind, ranks=WHO.get(kind, [3]), since_step=0, detected_step=0, excess_ratio=EXCESS.get(kind, 0)
    )
    assert f"> ● {headline(shown)}\n" in section
    evidence = section.split("Evidence: ")[1].split("\n\n")[0]
    names = [
        re.sub("_(data|forward|backward|optimizer)_", "_{phase}_", name) for name in re.findall(r"`(\w+)`", evidence)
    ]
    assert names
    assert [name for name in names if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in SOURCES)] == []


def test_the_table_names_every_environment_variable_and_no_other() -> None:
    in_code = {name for text in SOURCES for name in re.findall(r"\bRINGSIDE_[A-Z][A-Z_]*[A-Z]\b", text)}
    compiled = {"RINGSIDE_TABLE", "RINGSIDE_TABLE_NAME"}  # macros of the kernels
    table = [variable.name for variable in (*FOR_USERS, *FOR_LAUNCHERS)]
    assert set(table) == {"RINGSIDE"} | in_code - compiled
    assert len(table) == len(set(table))
    timeout = next(variable for variable in FOR_USERS if variable.name == "RINGSIDE_TIMEOUT_S")
    assert float(timeout.default) == Settings().timeout_s


def test_the_page_of_variables_is_what_the_table_says() -> None:
    assert (DOCS / "environment.md").read_text() == environment_page(), (
        "run `python -m docs.generate.environment > docs/environment.md`"
    )


def test_operations_say_the_port_that_the_code_has() -> None:
    assert f"127.0.0.1:{PORT}" in OPERATIONS


def test_scripts_that_pages_give_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        paths = [*re.findall(r"(?<![\w/])bench/\w+(?:/\w+)?\.py", text)]
        for module in re.findall(r"-m (bench(?:\.\w+)+)", text):
            path = module.replace(".", "/")
            paths.append(f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py")
        for path in paths:
            assert (ROOT / path).exists(), (page.name, path)


def table_below(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the first table below a heading of a page, without its head."""
    text = (DOCS / page).read_text().split(f"\n## {heading}\n")[1]
    lines = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[0].splitlines()[2:]]


def test_the_table_of_metrics_is_what_is_exported() -> None:
    listed = {name for row in table_below("alerts.md", "Metrics") for name in re.findall(r"`(\w+)`", row[0])}
    exported = {
        name.removesuffix("_total")
        for text in (ROOT / "tests" / "golden" / "files" / "pages").glob("metrics-*.txt")
        for name in re.findall(r"^# TYPE (\w+)", text.read_text(), re.MULTILINE)
    }
    assert listed == exported


def test_the_keys_and_columns_of_top_are_those_that_it_has() -> None:
    pytest.importorskip("textual", reason="textual is not installed here")
    from ringside.view.tui.app import TopApp
    from ringside.view.tui.rank_table import Columns

    bound = {key for binding in TopApp.BINDINGS for key in binding.key.split(",") if len(key) == 1}
    listed = {key for row in table_below("top.md", "Keys") for key in re.findall(r"`(\w)`", row[0])}
    assert listed == bound - set("jk")
    columns = [row[0] for row in table_below("top.md", "Contents of the screen")]
    names = {"spark": "own time"}
    assert columns == [names.get(name, name) for name in Columns.__annotations__ if name not in ("rank", "host")]

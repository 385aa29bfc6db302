"""Everything that tests, benchmarks, examples and pages import from Ringside is there.

Scripts that other processes run lie in strings, and pages hold blocks of Python: neither ruff nor mypy sees them.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from ringside.errors import RingsideError

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    path for folder in ("tests", "bench", "examples", "verification") for path in (ROOT / folder).rglob("*.py")
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
DOTTED = re.compile(r"ringside(?:\.[a-z_]\w*)+(?:[.:][A-Za-z_][\w.]*)?")

pytest.importorskip("torch")  # most of it needs torch


def imports(code: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of everything that code imports from Ringside; name "": the module itself."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "ringside")
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "ringside":
            yield from ((node.module or "", alias.name) for alias in node.names)


def imports_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield the same of single lines of a text that holds scripts, with placeholders perhaps."""
    for line in re.findall(r"^\s*((?:from ringside\S* import|import ringside)[^\n(]*)$", text, flags=re.MULTILINE):
        yield from imports(line)


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def patched(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that are given to `setattr` of a monkeypatch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str) and DOTTED.fullmatch(first.value):
                yield first.value


@cache
def there(module: str, name: str) -> bool:
    """Tell whether a module has a name; its submodules count."""
    try:
        found = importlib.import_module(module)
        if not name or hasattr(found, name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError as error:
        return (error.name or "").split(".")[0] != "ringside"  # a package that only some have may be missing
    except RingsideError:
        pass  # it is there, and says why it is of no use here
    return True


def resolves(dotted: str) -> bool:
    """Tell whether a dotted name leads to something, by modules first and then by attributes."""
    parts = dotted.replace(":", ".").split(".")
    for at in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:at]))
        except ModuleNotFoundError:
            continue
        for part in parts[at:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def test_what_is_imported_and_patched_is_there() -> None:
    missing, seen, in_strings = [], 0, 0
    for path in SOURCES:
        text = path.read_text()
        tree = ast.parse(text)
        hidden = [found for string in strings(tree) for found in imports_in(string)]
        wanted = [*imports(text), *hidden]
        missing += [f"{path.relative_to(ROOT)}: {module} {name}" for module, name in wanted if not there(module, name)]
        missing += [f"{path.relative_to(ROOT)}: {name}" for name in patched(tree) if not resolves(name)]
        seen, in_strings = seen + len(wanted), in_strings + len(hidden)
    assert not missing
    assert seen > 1500
    assert in_strings > 5  # scripts are files, which test_seams.py sees to


def test_what_pages_import_is_there() -> None:
    wanted = [(path, *found) for path in PAGES for found in imports_in(path.read_text())]
    assert not [f"{path.name}: {module} {name}" for path, module, name in wanted if not there(module, name)]
    assert len(wanted) > 10

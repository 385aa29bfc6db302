"""Ringside's modules and what each imports, found without importing any: for tests of who may import whom."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import ringside

ROOT = "ringside"


@cache
def modules(package: str = ROOT) -> dict[str, Path]:
    """Return the Python files of a package by the names of their modules, those of its subpackages and its own too."""
    found = {name: path for name, path in _all().items() if f"{name}.".startswith(f"{package}.")}
    assert found, f"there is no package {package}"
    return found


@cache
def _all() -> dict[str, Path]:
    return {ROOT: Path(ringside.__file__), **dict(_walk(ringside.__path__, f"{ROOT}."))}


def _walk(folders: Iterable[str], prefix: str) -> Iterator[tuple[str, Path]]:
    """What `pkgutil.walk_packages` yields, which would import every package (and so torch)."""
    for info in pkgutil.iter_modules(folders, prefix):
        spec = info.module_finder.find_spec(info.name, None)
        assert spec is not None
        if spec.origin is not None and spec.origin.endswith(".py"):  # the native core is none of ours to read
            yield info.name, Path(spec.origin)
        yield from _walk(spec.submodule_search_locations or (), f"{info.name}.")


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree of a file, parsed once."""
    return ast.parse(path.read_text())


@cache
def imports_of(name: str, path: Path) -> frozenset[str]:
    """Return the full name of every module that a module imports anywhere, for type checkers only excepted.

    Of `from x import y` that is `x.y` where that is a module of ours, else `x`; relative imports are resolved, and
    `importlib.import_module("x")` counts.

    Args:
        name: The module's full name.
        path: Its file.
    """
    tree = tree_of(path)
    for_types = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _last_name(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return frozenset(
        found for node in ast.walk(tree) if id(node) not in for_types for found in _imported(node, package)
    )


def _imported(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        yield from (full if (full := f"{base}.{alias.name}") in _all() else base for alias in node.names)
    elif isinstance(node, ast.Call) and _last_name(node.func) == "import_module":
        yield from (one.value for one in node.args[:1] if isinstance(one, ast.Constant) and isinstance(one.value, str))


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def is_in(name: str, packages: Iterable[str]) -> bool:
    """Return whether a module is one of some packages or modules, or lies in one."""
    return any(f"{name}.".startswith(f"{package}.") for package in packages)

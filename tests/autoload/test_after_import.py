"""A module is changed once it has been imported, and everybody else's imports are left alone."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ringside.autoload.after_import import after_import


@pytest.fixture
def changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Modules `watched_one`, `watched_two`, a package with `inner`, a namespace without a loader; what changed."""
    (tmp_path / "watched_one.py").write_text("value = 1\n")
    (tmp_path / "watched_two.py").write_text("value = 2\n")
    (tmp_path / "watched_package").mkdir()
    (tmp_path / "watched_package" / "__init__.py").write_text("")
    (tmp_path / "watched_package" / "inner.py").write_text("value = 3\n")
    (tmp_path / "watched_space").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in ("one", "two", "package", "package.inner", "space"):
        monkeypatch.setitem(sys.modules, f"watched_{name}", ModuleType("forgotten"))  # undone at the end
        del sys.modules[f"watched_{name}"]
    return []


def test_a_module_is_changed_when_it_has_been_executed_and_not_before(changes: list[str]) -> None:
    finders = list(sys.meta_path)
    after_import("watched_one", lambda module: changes.append(f"first {module.value}"))
    after_import("watched_two", lambda module: changes.append(f"other {module.value}"))
    after_import("watched_one", lambda module: changes.append(f"second {module.value}"))
    assert changes == []
    assert importlib.import_module("watched_one").value == 1
    assert changes == ["first 1", "second 1"]
    assert importlib.import_module("watched_two").value == 2
    assert changes == ["first 1", "second 1", "other 2"]
    assert sys.meta_path == finders


def test_an_imported_module_is_changed_at_once(changes: list[str]) -> None:
    importlib.import_module("watched_one")
    finders = list(sys.meta_path)
    after_import("watched_one", lambda module: changes.append(module.__name__))
    assert changes == ["watched_one"]
    assert sys.meta_path == finders


def test_a_module_of_a_package_is_found_where_the_package_lies(changes: list[str]) -> None:
    after_import("watched_package.inner", lambda module: changes.append(module.__name__))
    importlib.import_module("watched_package")
    assert changes == []
    assert importlib.import_module("watched_package.inner").value == 3
    assert changes == ["watched_package.inner"]


def test_what_is_not_there_is_missed_as_ever_and_what_has_no_loader_is_imported(changes: list[str]) -> None:
    after_import("watched_nowhere", lambda module: changes.append(module.__name__))
    with pytest.raises(ModuleNotFoundError, match="watched_nowhere"):
        importlib.import_module("watched_nowhere")
    after_import("watched_space", lambda module: changes.append(module.__name__))
    assert list(importlib.import_module("watched_space").__path__)
    assert changes == []

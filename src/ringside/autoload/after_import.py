"""Changes a module when it has been imported, not before: a process that never imports it pays nothing."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType


def after_import(target: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change` with a module: now, if it has been imported, or else as soon as it has been.

    Args:
        target: The module's full name.
        change: What to do; where several wait for one module, the first one that asked is called first.
    """
    if target in sys.modules:
        change(sys.modules[target])
        return
    waiting = next((f for f in sys.meta_path if isinstance(f, _Finder) and f.target == target), None)
    if waiting is None:
        waiting = _Finder(target)
        sys.meta_path.insert(0, waiting)
    waiting.changes.append(change)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module as everybody else does, and changes it once it has been executed."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.changes: list[Callable[[ModuleType], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.target:
            return None
        # Once: whatever imports the module again, as `importlib.reload`, gets it as it is.
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(self._execute_and_change, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec

    def _execute_and_change(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        execute(module)
        for change in self.changes:
            change(module)

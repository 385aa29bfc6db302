"""Which tests reach a line: a map that is made once, by running the tests under coverage (see `recorder`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import coverage

from .faults import NATIVE, ROOT, Fault

OF_THE_CORE = ("tests/native/", "tests/engine/")
# Interrupts its thread anywhere, also where coverage holds a lock of its own.
NOT_UNDER_COVERAGE = ("tests/engine/test_turns.py::test_ctrl_c_at_any_moment_leaves_no_line_stuck",)


class Reach:
    """The map, as it lies in a directory; `make` makes it.

    Args:
        directory: Where `make` has written.
        tree: The copy of the repository whose lines were counted.
    """

    def __init__(self, directory: Path, tree: Path) -> None:
        self._sources = directory
        self._data = coverage.CoverageData(str(directory / "all"))
        self._data.read()
        self._tree = tree
        self.tests = json.loads((directory / "tests.json").read_text())

    def of(self, fault: Fault) -> list[str]:
        """Return the tests that reach a fault and pass without it: those of `make test` first, then the cheapest first.

        A fault outside of functions is there as soon as its module is imported: all tests that reach the module count.
        So it is for a file that has changed since. All tests of `_native` reach the native core; those that
        are about it come first: there are more than can be tried.
        """
        if fault.package == NATIVE:
            found = self._native
        else:
            path = str(self._tree / fault.path)
            lines = self._data.contexts_by_lineno(path)
            then = self._sources / fault.path
            same = then.is_file() and then.read_bytes() == (ROOT / fault.path).read_bytes()
            asked = range(fault.statement, fault.line + 1) if fault.statement and same else list(lines)
            found = {test_of(context) for line in asked for context in lines.get(line, ())}
        known = [name for name in found if name in self.tests and not self.tests[name].keys() & {"failed"}]
        known = [name for name in known if not self.tests[name]["noisy"]]
        beside = {name for name in known if fault.package == NATIVE and not name.startswith(OF_THE_CORE)}

        def order(name: str) -> tuple[bool, bool, float]:
            return not self.tests[name]["core"], name in beside, self.tests[name]["seconds"]

        return sorted(known, key=order)

    @cached_property
    def _native(self) -> set[str]:
        """The tests that call the native core: they reach one of the lines that do."""
        found = set()
        for path in self._data.measured_files():
            if "/engine/" not in path:
                continue
            text = Path(path).read_text().splitlines()
            calls = {n for n, line in enumerate(text, 1) if "_core." in line or "native." in line}
            for line, contexts in self._data.contexts_by_lineno(path).items():
                if line in calls:
                    found |= {test_of(context) for context in contexts}
        direct = {path for path in (ROOT / "tests").rglob("test_*.py") if "_core.native()" in path.read_text()}
        names = {str(path.relative_to(ROOT)) for path in direct}
        return found | {name for name in self.tests if name.partition("::")[0] in names}


def test_of(context: str) -> str:
    """Return the test's name in a context: that of a started process ends with the phase, " (call)"."""
    for phase in (" (setup)", " (call)", " (teardown)"):
        context = context.removesuffix(phase)
    return context


def make(directory: Path, tree: Path, python: Path, chosen: Sequence[str]) -> None:
    """Run the tests of a copy of the repository under coverage, and keep what each reached.

    Args:
        directory: Where to.
        tree: The copy.
        python: Of its virtual environment.
        chosen: More arguments for pytest.
    """
    directory.mkdir(parents=True, exist_ok=True)
    command = [str(python), "-m", "pytest", "-n", "3", "-q", "-p", "tests.mutate.recorder", "--timeout", "600", *chosen]
    command += [f"--deselect={name}" for name in NOT_UNDER_COVERAGE]
    subprocess.run(command, cwd=tree, env={**environ(), "MUTATE_REACH": str(directory)}, check=False)
    data = coverage.CoverageData(str(directory / "all"))
    for part in sorted(directory.glob("coverage.*")):
        piece = coverage.CoverageData(str(part))
        try:
            piece.read()
            data.update(piece)
        except coverage.CoverageException as error:  # of a process that was killed while it wrote
            print(f"{part.name} is left out: {error}", file=sys.stderr)
        part.unlink()
    data.write()
    tests = {}
    for part in directory.glob("tests.*.json"):
        tests |= json.loads(part.read_text())
        part.unlink()
    for folder in ("src", "verification"):
        shutil.copytree(tree / folder, directory / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "tests.json").write_text(json.dumps(tests))


def environ() -> dict[str, str]:
    """Return the environment for a copy's processes: its bytecode is made once, and nothing is written later."""
    return {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}

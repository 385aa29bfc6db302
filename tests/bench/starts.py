"""Starts every module of bench/ and prints what went wrong with it: JSON, by name.

Modules that take options are asked for `--help`, all others only imported. Each is started in a fork of one process: so
torch is imported once, and nobody sees what another has imported.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import runpy
import sys
import traceback
from multiprocessing.queues import SimpleQueue
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
LIMIT_S = 30.0
_MOST_TOLD = 8000


def name_of(path: Path) -> str:
    """Return what `python -m` calls a module."""
    return ".".join(path.relative_to(BENCH.parent).with_suffix("").parts).removesuffix(".__main__")


def problem_with(path: Path) -> str:
    """Start one module in this process; return what went wrong, empty where nothing did."""
    name = name_of(path)
    takes_options = "make_parser(" in path.read_text() and name != "bench.common"
    sys.argv = [str(path), "--help"]
    written = io.StringIO()
    try:
        with contextlib.redirect_stdout(written):
            if takes_options:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                importlib.import_module(name)
    except SystemExit as end:
        helped = takes_options and not end.code and f"usage: python -m {name}" in written.getvalue()
        return "" if helped else f"ended with {end.code!r}: {written.getvalue()}"
    except BaseException:
        return traceback.format_exc()
    return "went on after --help" if takes_options else ""


def answer(path: Path, answers: SimpleQueue[str]) -> None:
    """Put the problem with a module into a queue."""
    answers.put(problem_with(path)[-_MOST_TOLD:])  # more than a pipe holds would wait for a reader


def main() -> None:
    """Start all of them."""
    for module in ("ringside.pytorch.ddp.attach", "ringside.survive.train"):  # once for all, as most import them
        importlib.import_module(module)

    context = multiprocessing.get_context("fork")
    found: dict[str, str] = {}
    for path in sorted(BENCH.rglob("*.py")):
        answers: SimpleQueue[str] = context.SimpleQueue()
        child = context.Process(target=answer, args=(path, answers))
        child.start()
        child.join(LIMIT_S)
        if child.exitcode is None:
            child.kill()
            child.join()
        found[name_of(path)] = answers.get() if not answers.empty() else f"ended with status {child.exitcode}"
    print(json.dumps(found))


if __name__ == "__main__":
    sys.path[0] = str(BENCH.parent)  # as where they are started: some import from tests/
    main()

"""A plugin of pytest that writes down which lines of Ringside every test reaches, its ranks and programs included.

`pytest -p tests.mutate.recorder` with MUTATE_REACH set to a directory. Coverage does the counting: the context of a
line is the test that is named in PYTEST_CURRENT_TEST, which processes that a test starts inherit. What a killed process
reached is not known.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
from tests.support.account import used

DIRECTORY = Path(os.environ["MUTATE_REACH"])
SETTINGS = Path(__file__).with_name("coverage.ini")

# Processes that are started find it here (coverage's .pth file), forked ones in `follow`.
os.environ["COVERAGE_PROCESS_START"] = str(SETTINGS)
# Sources are known by their places: `sitecustomize` is no module of ours by its name.
os.environ["MUTATE_ROOT"] = str(Path(__file__).parents[2])

_coverage: coverage.Coverage | None = None
_spent: dict[str, dict[str, Any]] = {}


def follow() -> None:
    """Count what this process, forked by a test, reaches for the test that it was forked for."""
    if running := coverage.Coverage.current():
        running.stop()
    counting = coverage.Coverage(config_file=str(SETTINGS), data_suffix=True)
    counting.start()


def pytest_sessionstart(session: pytest.Session) -> None:
    global _coverage
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return  # runs no test
    _coverage = coverage.Coverage(config_file=str(SETTINGS), data_suffix=True, context="")
    _coverage.start()


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if _coverage is not None:
        _coverage.switch_context(item.nodeid)
    began = time.monotonic(), *used()
    yield
    seconds = sum(used()[1:]) - sum(began[2:])
    _spent[item.nodeid] = {
        "seconds": round(seconds, 3),
        "core": chosen(item),
        "noisy": item.get_closest_marker("noisy") is not None,
    }


def chosen(item: pytest.Item) -> bool:
    """Tell whether `make test` runs this test."""
    names = {mark.name for mark in item.iter_markers()}
    return "core" in names or not names & {"long", "thorough"}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and report.nodeid in _spent:
        _spent[report.nodeid]["failed"] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _coverage is not None:
        _coverage.stop()
        _coverage.save()
        (DIRECTORY / f"tests.{os.getpid()}.json").write_text(json.dumps(_spent))

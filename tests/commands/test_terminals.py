"""Every verb that reads, and every help text, where output is not UTF-8 and where the terminal has no size."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.recorded_runs import own_times, write_run

from ringside.commands import VERBS, main

COMMANDS = [
    "report run", "report run --markdown", "compare run run", "doctor run", "top --once run", "verify ring --ranks 4",
    "draw ring -n 4 --text", *(f"{verb} --help" for verb in VERBS),
]  # fmt: skip


def printed(command: str, encoding: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Return what a command writes to a standard output of this encoding."""
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    with contextlib.suppress(SystemExit):  # --help ends so
        assert main(command.split()) in (0, 1, 4)
    out.flush()
    return out.buffer.getvalue()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "run", own_times(24, 2))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_no_utf8_and_no_size(command: str, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(runs)
    assert printed(command, "ascii", monkeypatch).isascii()
    printed(command, "iso-8859-1", monkeypatch).decode("iso-8859-1")
    monkeypatch.setenv("COLUMNS", "1")
    monkeypatch.setenv("LINES", "1")
    assert printed(command, "utf-8", monkeypatch)


def test_errors_are_written_too_and_a_path_that_is_no_text_stays_as_it_is(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs)
    path = os.fsdecode(b"r\xc3\xb6\xff")
    shutil.copytree(runs / "run", runs / path)
    assert printed(f"report {path}", "ascii", monkeypatch).splitlines()[-1] == b"r?\xff/report.html"
    err = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", err)
    assert main(["report", "nö"]) == 2
    err.flush()
    assert err.buffer.getvalue().startswith(b"ringside report: n? is no run")

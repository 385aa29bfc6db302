"""What golden tests share: the files, a directory with copies of recorded runs, and a command line of 80 columns."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.golden.calls import Call
from tests.support.golden import Golden

from ringside.commands import main

RUNS = Path(__file__).parent / "runs"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(Path(__file__).parent / "files", write=request.config.getoption("--write-golden"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new current directory with the recorded runs `demo` and `hosts`, and nothing that changes how we print."""
    for age, run in enumerate(sorted(RUNS.iterdir())):
        shutil.copytree(run, tmp_path / run.name)
        os.utime(tmp_path / run.name / "run.json", (1.7e9 - age, 1.7e9 - age))  # lists show the newest first
    (tmp_path / "data").symlink_to(Path(__file__).parents[1] / "data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # no other job of this machine
    for name in ("NO_COLOR", "FORCE_COLOR", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def command(place: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call `ringside` with words; return its exit status and what it printed on stdout and stderr."""

    def call(words: str) -> tuple[int, str, str]:
        try:
            status = main(words.split())
        except SystemExit as ended:  # argparse's way out
            status = ended.code if isinstance(ended.code, int) else 1
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return call

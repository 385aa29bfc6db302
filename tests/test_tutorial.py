"""The tutorial, followed word for word: its script is trained, its commands are run, and they say what it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ringside.commands import main
from ringside.engine.topology import usable_cores

RECORDED = Path(__file__).parent / "tutorial_runs.tar.xz"
PAGE = (Path(__file__).resolve().parents[1] / "docs" / "tutorial.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHOWN = [
    part.split("\n", 1)
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]
]
FAILS = ("--fail-over",)
OVERLOADED = 3.0
"""Processes that want a core, per core: then steps say more of the others than of the disk, and nobody may be named."""


def shape(line: str) -> str:
    """Return a line without what differs from run to run: numbers and their units, widths of columns."""
    return " ".join(re.sub(r"[+−]?\d[\d,.]*( ?(%|µs|ms|s|MB)(?!\w))?", "#", line).split())


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of ours; what goes wrong goes to the same place as what goes right, as in a terminal."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("RINGSIDE", "PET_"))}
    return subprocess.run(
        [sys.executable, "-m", *shlex.split(command)], cwd=folder, env={**environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=150,
    )  # fmt: skip


def test_what_reads_a_run_prints_what_is_shown_to_the_digit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's numbers are those of two runs of its script that were recorded once."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    read = [(command, shown) for command, shown in SHOWN if not command.startswith("ringside run")]
    assert len(read) == 5
    for command, shown in read:
        assert main(shlex.split(command)[1:]) == int(any(flag in command for flag in FAILS))
        printed = iter([line.rstrip() for line in capsys.readouterr().out.splitlines()])
        for line in shown.splitlines():
            assert line in ("...", "") or line in printed, (command, line)  # in this order


@pytest.mark.noisy
@pytest.mark.timeout(600)
@pytest.mark.long
def test_every_command_prints_what_is_shown(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for command, shown in SHOWN:
        done = run(command, tmp_path)
        if "●" not in done.stdout and command == SHOWN[0][0] and os.getloadavg()[0] > OVERLOADED * usable_cores():
            pytest.skip(f"this machine has a load of {os.getloadavg()[0]:.0f}: nobody was named")
        assert done.returncode == int(any(flag in command for flag in FAILS)), done.stdout
        printed = iter([shape(line) for line in done.stdout.splitlines()])
        for line in filter(None, map(shape, shown.splitlines())):
            assert line == "..." or line in printed, (line, done.stdout)  # in this order

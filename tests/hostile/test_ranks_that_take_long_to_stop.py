"""Ranks that are asked to stop have the time to save that torchrun gives them, and no less."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from ringside.launch import torchrun as launch
from ringside.launch.torchrun import parse_command_line

SAVES = """
import pathlib, signal, time
def save(*_):
    time.sleep(3)
    pathlib.Path("saved").touch()
    raise SystemExit(0)
signal.signal(signal.SIGTERM, save)
pathlib.Path("started").touch()
time.sleep(60)
"""


def test_a_rank_saves_for_longer_than_our_own_patience(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(launch, "GRACES_S", (0.2, 0.2, 4.0))
    monkeypatch.chdir(tmp_path)
    Path("save.py").write_text(SAVES)
    started = launch.Launch(["--standalone", "--nproc-per-node=1", "save.py"], os.environ)
    deadline = time.monotonic() + 60
    while not Path("started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # another process's making: there is no event to wait for
    assert started.end(signal.SIGTERM)
    assert Path("saved").exists()


@pytest.mark.parametrize(
    ("flags", "environ", "seconds"),
    [
        ([], {}, 30.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, 90.0),
        ([], {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90", "PET_SHUTDOWN_TIMEOUT": "120"}, 120.0),
        (["--shutdown-timeout", "600"], {"PET_SHUTDOWN_TIMEOUT": "120"}, 600.0),
        (["--standalone", "--shutdown_timeout=7"], {}, 7.0),
        (["--shutdown-timeout", "soon"], {}, 30.0),  # torchrun says what is wrong with it
    ],
)
def test_torchruns_patience_is_found_where_torchrun_finds_it(
    flags: list[str], environ: dict[str, str], seconds: float
) -> None:
    assert parse_command_line([*flags, "train.py"], environ=environ).shutdown_timeout_s == seconds


@pytest.mark.parametrize(
    ("flags", "environ", "names"),
    [
        ([], {}, {"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"}),
        (["--signals-to-handle=SIGTERM, SIGUSR1"], {}, {"SIGTERM", "SIGUSR1"}),
        (["--signals_to_handle", "SIGUSR2,SIGKILL,SIGODD"], {"PET_SIGNALS_TO_HANDLE": "SIGUSR1"}, {"SIGUSR2"}),
        ([], {"PET_SIGNALS_TO_HANDLE": "SIGUSR1"}, {"SIGUSR1"}),
    ],
)
def test_what_torchrun_passes_on_is_passed_on_to_it(flags: list[str], environ: dict[str, str], names: set[str]) -> None:
    line = parse_command_line([*flags, "train.py"], environ=environ)
    assert {number.name for number in line.signals_to_handle} == names

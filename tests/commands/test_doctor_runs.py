"""The doctor on Ringside's own runs as they really are: one that ended, one of which everything was killed."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from tests.support.waiting import until

from ringside.doctor import as_json, examine
from ringside.doctor.ringside_run import WARM_UP_STEPS
from ringside.monitor.run.directory import RunReader
from ringside.monitor.run.table import tabulate

from . import launched

pytest.importorskip("torch")

from .forked_launch import Command

SLOW = ("--inject", "slow:rank=1,factor=3,from_step=8")
QUICK = ("demo", "--size", "tiny", "--nproc-per-node", "2", "--seed", "5", "--no-comparison", *SLOW)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus").mkdir()
    for index in range(4):
        shutil.copy(Path(__file__).parents[1] / "test_faults.py", tmp_path / "corpus" / f"{index}.py")
    return tmp_path / "corpus"


def replayed_as_recorded(path: Path) -> None:
    found = as_json(examine([path]))["what_if"]
    assert {"slowdown", "worst_worker_share", "last_stage_share", "cost_rank_hours"} <= found.keys()
    reader = RunReader(path)
    table = tabulate(reader.iterate(), 2)
    whole = np.isfinite(table["own_seconds"]).all(axis=1)
    assert WARM_UP_STEPS < found["steps"] <= whole.sum()
    assert found["recorded_step_s"] == pytest.approx(
        table["step_seconds"][whole].mean(axis=1)[-found["steps"] :].mean(), rel=1e-6
    )
    # own + exposed = step on every rank, and who is blocked least was last: a replay takes what the run took
    assert found["step_s"] == pytest.approx(found["recorded_step_s"], rel=0.25)
    assert found["cost_rank_hours"] >= 0
    assert str(path) in found["source"]


def test_a_real_run(tmp_path: Path, corpus: Path, command: Command):
    path = tmp_path / "run"
    status, _, err = command(*QUICK, "--steps", 60, "--run-dir", path, "--corpus", corpus)
    assert status in (0, 1), err
    replayed_as_recorded(path)


@pytest.mark.long
def test_a_real_run_cut_off_by_sigkill(tmp_path: Path, corpus: Path):
    path = tmp_path / "run"
    process = launched.start(*QUICK, "--steps", 1_000_000, "--run-dir", path, "--corpus", corpus)
    until(
        launched.while_running(
            process, lambda: (path / "steps.jsonl").exists() and (path / "steps.jsonl").stat().st_size > 30_000
        )
    )
    process.send_signal(signal.SIGSTOP)  # so that nobody is left to write how it ended
    for pid in launched.pids(path):
        os.kill(pid, signal.SIGKILL)
    process.kill()
    launched.finish(process)
    until(lambda: launched.gone(path))
    for name in ("summary.json", "report.html"):
        (path / name).unlink(missing_ok=True)
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    assert all(event["kind"] != "ended" for event in events)
    replayed_as_recorded(path)
    assert all("cut off" in note.text for note in examine([path]).notes)

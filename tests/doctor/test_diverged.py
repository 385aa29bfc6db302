"""A run whose replicas drifted apart, as the doctor, the summary and the report tell it afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from ringside.doctor import examine
from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.replicas import Check, ReplicaCheck
from ringside.monitor.run.directory import RunWriter
from ringside.monitor.summary import finish_run
from ringside.view.html.run_report import render_report
from ringside.view.verdict_text import finding_text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four ranks that agree after step 9; from step 19 on ranks 1 and 3 differ from the others."""
    info = RunInfo(
        schema=1, name="run", started_unix=0, command=[], world_size=4, hosts=["h"] * 4, pids=[0] * 4, engine="gloo"
    )
    writer = RunWriter(tmp_path / "run", info)
    writer.append(
        StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=0.2, own_seconds=0.1)
        for step in range(30)
        for rank in range(4)
    )
    replicas = ReplicaCheck(range(4), ["a", "b"])
    for number, digests in ((10, [1, 1, 1, 1]), (20, [1, 2, 1, 3])):
        told = {rank: [Check(number, number - 1, digest, float(number))] for rank, digest in enumerate(digests)}
        for change in replicas.judge(told, lambda _: {rank: [5, rank % 2 * rank] for rank in range(4)}):
            verdict = msgspec.to_builtins(change.verdict)
            writer.event({"unix": 1.0, "kind": change.kind, "step": 19, "verdict": verdict})
    writer.event({"unix": 2.0, "kind": "ended", "steps": 30})
    return writer.path


def test_the_doctor_tells_it(run: Path) -> None:
    (verdict,) = examine([run]).verdicts
    assert (verdict.kind, verdict.ranks, verdict.since_step) == ("diverged", [1, 3], 10)
    told = finding_text(verdict)
    assert told.headline == "The replicas of ranks 1 and 3 drifted apart from the others."
    assert "Parameter b differs from those of ranks 0 and 2" in told.why
    assert "test the memory of ranks 1 and 3" in told.next
    assert "rank-seconds lost" in told.price


def test_summary_and_report_tell_it(run: Path) -> None:
    (content,) = finish_run(run, render_report)["verdicts"]
    assert content["cost_rank_seconds"] == pytest.approx(4 * 10.0)
    assert json.loads((run / "summary.json").read_text())["verdicts"] == [content]
    page = (run / "report.html").read_text()
    assert "The replicas of ranks 1 and 3 drifted apart from the others" in page
    assert "Since step 10; detected at step 19." in page

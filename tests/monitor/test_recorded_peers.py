"""A recorded run of a job whose ranks do different work: what is said of it afterwards is what was said live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.monitor.jobs import DATA, STAGES, TENSOR, crossed_rows, peer_rows, run_info

from ringside.commands import main
from ringside.doctor.examine import examine
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import EVENTS, RunReader, RunWriter
from ringside.monitor.run.records import Group, Row
from ringside.monitor.summary import assess_run
from ringside.monitor.verdict import Verdict

ATTRIBUTION = ("place", "peers", "held_up", "by_way_of")
JOBS = {
    "through others": ([*DATA, *TENSOR], crossed_rows(200), 3),
    "a stage's replica": ([*DATA, *STAGES], peer_rows(200, slow=2), 2),
    "no replica": (STAGES, peer_rows(300, slow=1), 1),
}


def record(path: Path, groups: list[Group], job: list[Row]) -> list[Verdict]:
    """Write a run as its collector does; return the verdicts on ranks that it reached."""
    collector = StepCollector(4, RunWriter(path, run_info(4)))
    collector.note("started")
    first = job[0][0]
    collector.add([msgspec.structs.replace(first, new_groups=tuple(groups)), *list(job[0].values())[1:]])
    for row in job[1:]:
        collector.add(row.values())
    verdicts = [verdict for verdict in collector.verdicts if verdict.ranks]  # a stage is heavier, besides
    collector.close()
    return verdicts


def said_of(verdict: Verdict | dict[str, Any]) -> tuple[Any, ...]:
    content = msgspec.to_builtins(verdict)
    return content["kind"], content["ranks"], [content["evidence"].get(name) for name in ATTRIBUTION]


@pytest.mark.parametrize("name", JOBS)
def test_the_verdict_is_that_of_the_live_run(tmp_path: Path, name: str) -> None:
    groups, job, slow = JOBS[name]
    (live,) = record(tmp_path, groups, job)
    assert live.ranks == [slow]
    summary, _ = assess_run(RunReader(tmp_path))
    (again,) = (told for told in summary["verdicts"] if told["ranks"])
    assert said_of(again) == said_of(live)
    assert again["since_step"] == live.since_step
    assert again["cost_rank_seconds"] == pytest.approx(live.cost_rank_seconds, rel=0.1)


@pytest.mark.parametrize("name", JOBS)
def test_records_alone_lead_to_the_same_verdict(tmp_path: Path, name: str) -> None:
    """A run that was killed before its verdict was written: only its groups are known, and its steps."""
    groups, job, _ = JOBS[name]
    (live,) = record(tmp_path, groups, job)
    events = (tmp_path / EVENTS).read_bytes().splitlines(keepends=True)
    (tmp_path / EVENTS).write_bytes(b"".join(line for line in events if b'"groups"' in line))
    summary, _ = assess_run(RunReader(tmp_path))
    (again,) = (told for told in summary["verdicts"] if told["ranks"])
    assert said_of(again) == said_of(live)
    assert (again["since_step"], again["detected_step"]) == (live.since_step, live.detected_step)


def test_the_doctor_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    groups, job, _ = JOBS["through others"]
    (live,) = record(tmp_path, groups, job)
    findings = examine([tmp_path])
    (found,) = findings.verdicts
    assert said_of(found) == said_of(live)
    (sheet,) = (each for each in findings.sheets if each.title.startswith("Ranks of the run"))
    assert [row[sheet.columns.index("place")] for row in sheet.rows][3] == "dp 1, tp 1"
    main(["doctor", str(tmp_path)])
    assert "Chain: 0 → 1 → 3: 0 waits for 3 by way of 1" in capsys.readouterr().out

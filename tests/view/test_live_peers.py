"""A job whose ranks do different work, as views see it while it runs: each rank beside its peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.monitor.jobs import DATA, STAGES, peer_rows, run_info

from ringside.monitor.assessment import Assessment, describe_assessment
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import RunReader, RunWriter
from ringside.monitor.run.records import Group
from ringside.monitor.summary import assess_run
from ringside.view.run.live import LiveRun


def test_excess_and_price_are_those_among_peers(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, run_info(4))
    collector = StepCollector(4, writer)
    job = peer_rows(200, slow=3)
    first = job[0][0]
    job[0][0] = msgspec.structs.replace(first, new_groups=(*DATA, *STAGES))
    for row in job:
        collector.add(row.values())
    verdict, imbalance = collector.verdicts
    assert verdict.ranks == [3]
    assert imbalance.kind == "stage_imbalance"

    live = LiveRun(tmp_path)
    while live.poll():
        pass
    excess = [rank.excess_ratio for rank in live.now()]
    assert excess == pytest.approx([0.0, -0.2, 0.0, 0.25], abs=0.04)
    (finding,) = (one for one in live.following.findings if one.verdict.ranks)
    assert finding.cost_rank_seconds == pytest.approx(verdict.cost_rank_seconds, rel=0.1)

    collector.close()
    summary, _ = assess_run(RunReader(tmp_path))
    (told,) = (one for one in summary["verdicts"] if one["ranks"])
    assert told["ranks"] == [3]
    assert told["evidence"]["place"] == "dp 1, pp 1"
    assert told["evidence"]["peers"] == "rank 1"
    assert told["cost_rank_seconds"] == pytest.approx(verdict.cost_rank_seconds, rel=0.1)
    own = np.array([rank["excess_ratio"] for rank in summary["ranks"]])
    assert own == pytest.approx([0.0, -0.19, 0.0, 0.23], abs=0.03), "over the whole run"


def summary_of(path: Path, groups: tuple[Group, ...]) -> dict[str, Any]:
    collector = StepCollector(4, RunWriter(path, run_info(4)))
    job = peer_rows(200)
    job[0][0] = msgspec.structs.replace(job[0][0], new_groups=groups)
    for row in job:
        collector.add(row.values())
    collector.close()
    return assess_run(RunReader(path))[0]


def test_ranks_that_nobody_can_be_compared_with_are_not_called_healthy(tmp_path: Path) -> None:
    found = summary_of(tmp_path, tuple(STAGES))["assessment"]
    assert (found["state"], found["compared"]) == ("undecided", False)
    assert "own past" in describe_assessment(msgspec.convert(found, Assessment))


def test_a_heavier_stage_leaves_a_healthy_run_healthy(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, (*DATA, *STAGES))
    assert [(verdict["kind"], verdict["ranks"]) for verdict in summary["verdicts"]] == [("stage_imbalance", [])]
    assert summary["assessment"]["state"] == "none"
    assert summary["assessment"]["found_ratio"] == 0.1


def test_groups_that_cannot_be_end_no_view(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, run_info(4))
    collector = StepCollector(4, writer)
    for group in ({"name": "1", "description": "mesh_tp", "ranks": [0, 99]}, {"name": 7}, "nonsense"):
        collector.note("groups", groups=[group])
    for row in peer_rows(40):
        collector.add(row.values())
    collector.close()
    live = LiveRun(tmp_path)
    while live.poll():
        pass
    assert len(live.now()) == 4
    assert assess_run(RunReader(tmp_path))[0]["steps"] == 40

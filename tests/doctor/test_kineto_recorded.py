"""A job that really runs, in processes of its own, recorded by torch.profiler as it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.ranks import on_ranks

pytest.importorskip("torch")

from ringside.doctor import examine

from .recorded_job import train_and_record

STEPS = 12
GRADIENT_BYTES = 4 * 4 * (256 * 256 + 256)


@pytest.fixture(scope="module")
def recorded_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    on_ranks(2, train_and_record, folder, STEPS, "slow:rank=1,factor=30")
    return folder


def test_every_collective_of_a_recorded_job_is_found_and_matched(recorded_job):
    found = examine([recorded_job / "trace_0.json", recorded_job / "trace_1.json.gz"])
    figures = found.facts["kineto"]
    assert figures["ranks"] == [0, 1]
    assert figures["world_size"] == 2
    assert figures["backends"] == ["gloo"]
    assert len(figures["steps_in_common"]) == STEPS
    assert figures["unmatched_collectives"] == 0
    ranks = next(sheet for sheet in found.sheets if "Ranks" in sheet.title)
    for row in ranks.rows:
        values = dict(zip(ranks.columns, row, strict=True))
        assert values["bytes"] == GRADIENT_BYTES
        assert values["collectives"] * STEPS == figures["matched_collectives"]
        assert values["compute_s"] > 0
        assert values["last_gradient_to_last_collective_s"] > 0
        assert values["own_s"] + values["exposed_s"] == pytest.approx(values["step_s"])
    assert all(answer.answer is not None for answer in found.questions.values())


def test_the_slow_rank_of_a_recorded_job_waits_least(recorded_job):
    found = examine([recorded_job / "trace_0.json", recorded_job / "trace_1.json.gz"])
    ranks = next(sheet for sheet in found.sheets if "Ranks" in sheet.title)
    fast, slow = (dict(zip(ranks.columns, row, strict=True)) for row in ranks.rows)
    assert slow["own_s"] > fast["own_s"]
    assert slow["wait_s"] < fast["wait_s"]
    assert all(verdict.ranks == [1] for verdict in found.verdicts if verdict.kind == "slow_rank")


def test_a_recorded_job_is_replayed_as_it_ran(recorded_job):
    found = examine([recorded_job / "trace_0.json", recorded_job / "trace_1.json.gz"]).what_if
    assert found is not None
    assert found["step_s"] == pytest.approx(found["recorded_step_s"], rel=0.25)
    assert found["steps"] == STEPS - 1
    assert found["worst_ranks"] == [1]


def test_one_of_its_ranks_alone(recorded_job):
    found = examine([recorded_job / "trace_1.json.gz"])
    assert found.verdicts == []
    assert any("of 2 ranks only rank 1 is here, not rank 0" in line.why for line in found.unjudged)

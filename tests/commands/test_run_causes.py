"""A real rank that is held back while `ringside run` watches: it is named, and so is what holds it back."""

import json
from pathlib import Path

import pytest
from tests.quotas import quota_or_skip

from . import launched

pytest.importorskip("torch")

BEGIN = 48
SCRIPT = Path(__file__).parent / "scripts" / "held_back.py"


@pytest.mark.noisy
def test_a_throttled_rank_is_named_with_its_quota(tmp_path, command):
    with quota_or_skip(cpus=0.04) as quota:
        status, _, err = command(
            *("run", "--run-dir", tmp_path / "run", "--nproc-per-node=2", SCRIPT),
            BEGIN=str(BEGIN),
            HELD_IN=str(quota.members),
            FREE_IN=str(quota.home),
        )
    assert status == 0, err
    told = [v for v in launched.summary(tmp_path / "run")["verdicts"] if v["ranks"] == [1] and v["since_step"] > 40]
    assert [verdict["kind"] for verdict in told] == ["slow_rank"]
    (verdict,) = told
    # (Which cause comes first, this one or others' work on the same cores, is tried in monitor/test_cause.py.)
    assert "its container was throttled " in verdict["cause"], verdict
    assert "quota 0.04 CPUs" in verdict["cause"]
    evidence = verdict["evidence"]
    assert evidence["throttled_ratio"] > 0.1
    assert evidence["others_throttled_ratio"] == 0
    assert evidence["quota_cpus"] == pytest.approx(0.04)
    # The healthy rank records no throttling, and neither of the two was ever asked on the path of a step.
    known = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    shown = [one for one in known if "vitals" in one]
    assert {one["rank"] for one in shown} == {0, 1}
    assert all("throttled_seconds" not in one["vitals"] for one in shown if one["rank"] == 0)
    assert max(one["vitals"].get("throttled_seconds", 0) for one in shown if one["rank"] == 1) > 0

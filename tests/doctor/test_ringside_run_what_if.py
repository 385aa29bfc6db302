"""What-if on own runs whose times are known (tests/commands/test_doctor_runs.py: on runs that really ran)."""

from __future__ import annotations

import numpy as np
import pytest

from ringside.doctor.ringside_run import WARM_UP_STEPS, what_if
from ringside.monitor import StepRecord
from ringside.monitor.run.table import StepTable, tabulate


def table_of(own: np.ndarray, transfer_s: float = 0.01) -> StepTable:
    step = own.max(axis=1) + transfer_s
    return tabulate(
        (
            StepRecord(
                step=s, rank=r, ended_unix=0, step_seconds=float(step[s]), own_seconds=float(own[s, r]),
                exposed_seconds=float(step[s] - own[s, r]),
            )
            for s in range(len(own))
            for r in range(own.shape[1])
        ),
        own.shape[1],
    )  # fmt: skip


def test_one_slow_rank_of_four_by_hand():
    own = np.full((20, 4), 0.1)
    own[:, 2] = 0.15
    found, unjudged = what_if("x", table_of(own))
    assert unjudged == []
    assert found is not None
    assert found["slowdown"] == pytest.approx(0.16 / 0.1225)
    assert found["slowdown_at_median"] == pytest.approx(0.16 / 0.11)
    assert found["worst_ranks"] == [2]
    assert found["worst_worker_share"] == pytest.approx((0.16 - 0.1225) / (0.16 - 0.1225))
    assert found["last_stage_share"] is None
    assert found["cost_rank_hours"] == pytest.approx((0.16 - 0.1225) * 20 * 4 / 3600)
    assert found["recorded_step_s"] == pytest.approx(found["step_s"])


def test_warm_up_is_left_out_of_long_runs():
    own = np.full((60, 2), 0.1)
    own[:WARM_UP_STEPS, 0] = 9.0
    found, _ = what_if("x", table_of(own))
    assert found is not None
    assert found["slowdown"] == pytest.approx(1.0)
    assert found["steps"] == 60 - WARM_UP_STEPS


def test_steps_that_lack_a_rank_are_left_out_and_said():
    own = np.full((12, 3), 0.1)
    table = table_of(own)
    table["own_seconds"][8:, 1] = np.nan
    found, unjudged = what_if("x", table)
    assert found is not None
    assert found["steps"] == 8
    assert "4 steps of 12 lack the record of some rank" in unjudged[0].why
    table["own_seconds"][1:, 1] = np.nan
    found, unjudged = what_if("x", table)
    assert found is None
    assert "only 1 step" in unjudged[0].why


def test_one_rank_alone_has_no_peers():
    assert what_if("x", table_of(np.full((12, 1), 0.1))) == (None, [])

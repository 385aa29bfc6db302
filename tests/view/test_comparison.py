from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.errors import UsageError
from ringside.view.run.comparison import compare
from ringside.view.run.recorded import Run


def run_of(path: Path, own: np.ndarray, **more: object) -> Run:
    return Run(write_run(path, own, **more))  # type: ignore[arg-type]


def test_the_same_job_twice_does_not_differ_beyond_chance(tmp_path: Path) -> None:
    certain = 0
    for seed in range(20):
        before = run_of(tmp_path / f"a{seed}", own_times(100, 4, seed=2 * seed))
        after = run_of(tmp_path / f"b{seed}", own_times(100, 4, seed=2 * seed + 1))
        certain += compare(before, after).step.is_certain
    assert certain <= 3


def test_ten_percent_are_ten_percent(tmp_path: Path) -> None:
    before = run_of(tmp_path / "a", own_times(200, 4, seed=1))
    after = run_of(tmp_path / "b", 1.1 * own_times(200, 4, seed=2))
    found = compare(before, after)
    assert found.step.low < found.step.ratio < found.step.high
    assert found.step.ratio == pytest.approx(0.096, abs=0.01)  # the synchronisation did not become slower
    assert found.is_slower_than(0.05)
    assert not found.is_slower_than(0.12)
    assert not compare(after, before).is_slower_than(0.0)


def test_slow_drift_widens_the_interval(tmp_path: Path) -> None:
    drift = np.repeat(np.random.default_rng(3).normal(0, 0.05, 10), 20)[:, None]
    steady, wandering = own_times(200, 4, seed=1), own_times(200, 4, seed=1) * np.exp(drift)
    narrow = compare(run_of(tmp_path / "a", own_times(200, 4, seed=2)), run_of(tmp_path / "b", steady)).step
    wide = compare(run_of(tmp_path / "c", own_times(200, 4, seed=2)), run_of(tmp_path / "d", wandering)).step
    assert wide.high - wide.low > 3 * (narrow.high - narrow.low)


def test_new_and_gone_verdicts_and_what_else_differs_are_told(tmp_path: Path) -> None:
    well = run_of(tmp_path / "a", own_times(120, 4), engine="gloo")
    slow = Run(slow_run(tmp_path / "b"))
    found = compare(well, slow)
    assert [(verdict.kind, verdict.ranks) for verdict in found.new_verdicts] == [("slow_rank", [2])]
    assert not found.gone_verdicts
    assert found.remarks == ["different engines: gloo and ringside"]
    assert [verdict.ranks for verdict in compare(slow, well).gone_verdicts] == [[2]]


def test_a_straggler_that_the_other_run_may_have_had_as_well_is_uncertain(tmp_path: Path) -> None:
    slow, well = Run(slow_run(tmp_path / "a")), run_of(tmp_path / "b", own_times(120, 4))

    def uncertain(state: str, suspected: int, found: float) -> list[list[int]]:
        """Whose verdict is uncertain where the other run suspects a rank, and would have found one so much slower."""
        well.summary["assessment"] = {"state": state, "rank": suspected}
        well.summary["undecided"] = {"step": 119, "found": {"100": found}}
        new, gone = (compare(*runs).uncertain_verdicts for runs in ((well, slow), (slow, well)))
        assert new == gone
        return [verdict.ranks for verdict in new]

    assert uncertain("undecided", suspected=2, found=0.05) == [[2]]
    assert uncertain("undecided", suspected=1, found=0.05) == [], "it would have been found"
    assert uncertain("undecided", suspected=1, found=0.9) == [[2]]
    assert uncertain("none", suspected=2, found=0.9) == []
    slow.summary["verdicts"][0]["kind"] = "dead_rank"
    del slow.verdicts  # they are read once
    assert uncertain("undecided", suspected=2, found=0.9) == [], "no run hides a death"


def test_jobs_that_do_not_tell_forward_from_backward_have_one_row_for_both(tmp_path: Path) -> None:
    def watched(name: str, seconds: float) -> Run:
        path = write_run(tmp_path / name, own_times(60, 2)) / "steps.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        phases = {"forward_seconds": 0.0, "backward_seconds": 0.0, "compute_seconds": seconds}
        path.write_text("".join(json.dumps({**record, **phases}) + "\n" for record in records))
        return Run(path.parent)

    found = {change.name: change for change in compare(watched("a", 0.1), watched("b", 0.12)).changes}
    assert found["forward and backward"].ratio == pytest.approx(0.2)
    assert not {"forward", "backward"} & found.keys()


def test_too_few_steps_are_refused_by_name(tmp_path: Path) -> None:
    short = run_of(tmp_path / "short", own_times(8, 2))
    with pytest.raises(UsageError, match="short has 8 steps; comparing needs 10 after 5"):
        compare(short, run_of(tmp_path / "b", own_times(40, 2)))

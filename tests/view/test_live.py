from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import pytest
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.view.run.live import RECENT_STEPS, LiveRun


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    assert not live.poll()
    assert live.now() == []
    write_run(tmp_path / "run", own_times(20, 4))
    assert live.poll()
    assert live.ranks == 4
    assert live.steps().tolist() == list(range(20))
    assert live.rows("own_seconds") == pytest.approx(own_times(20, 4), rel=1e-5)
    assert not live.poll()


def test_a_long_run_is_read_piece_by_piece(tmp_path: Path) -> None:
    path = slow_run(tmp_path / "run", steps=20, onset=10)
    live, whole, pieces = LiveRun(path, at_once=7), LiveRun(path), 0
    whole.poll()
    while live.poll() and live.behind:
        pieces += 1
        assert len(live.fresh) == 7
    assert pieces == 20 * 4 // 7
    assert live.now() == whole.now()
    assert not live.poll()
    write_run(tmp_path / "run", own_times(3, 2))  # another run has begun
    live.poll()
    assert live.behind is False
    assert live.steps().tolist() == [0, 1, 2]


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    live = LiveRun(write_run(tmp_path / "run", own_times(100, 2)), steps_kept=32)
    live.poll()
    assert live.steps().tolist() == list(range(68, 100))
    assert live.rows("wait_seconds").shape == (32, 2)


def test_figures_are_of_the_last_steps_and_excess_leaves_the_rank_out(tmp_path: Path) -> None:
    live = LiveRun(slow_run(tmp_path / "run"))
    live.poll()
    now = live.now()
    assert [rank.step for rank in now] == [119] * 4
    assert now[2].excess_ratio == pytest.approx(0.3, abs=0.05)
    assert abs(now[1].excess_ratio) < 0.05
    assert now[2].wait_seconds < min(now[rank].wait_seconds for rank in (0, 1, 3))


def test_a_job_elsewhere_whose_steps_take_long_is_not_taken_for_ended(tmp_path: Path) -> None:
    path = slow_run(tmp_path / "run", steps=20, onset=10)  # steps of 0.13 s, no event that it ended
    fast = LiveRun(path)
    fast.poll()
    for ago_s, over in ((6.0, True), (4.0, False)):
        os.utime(path / "steps.jsonl", (time.time() - ago_s,) * 2)
        assert fast.is_abandoned() is over
    slow = LiveRun(write_run(tmp_path / "slow", 300.0 * own_times(20, 4)))  # steps of half a minute
    slow.poll()
    for ago_s, over in ((60.0, False), (600.0, True)):
        os.utime(tmp_path / "slow" / "steps.jsonl", (time.time() - ago_s,) * 2)
        assert slow.is_abandoned() is over


def test_another_run_in_the_same_place_is_followed_anew(tmp_path: Path) -> None:
    live = LiveRun(write_run(tmp_path / "run", own_times(50, 4)))
    live.poll()
    before = live.version
    shutil.rmtree(tmp_path / "run")
    assert not live.poll()
    write_run(tmp_path / "run", own_times(7, 2))
    live.poll()
    assert (live.ranks, live.steps().tolist(), live.restarts) == (2, list(range(7)), 1)
    assert live.version > before


def test_memory_is_bounded_by_ranks(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(RECENT_STEPS + 4, 2))
    tracemalloc.start()
    try:
        live = LiveRun(path, steps_kept=10**9)
        live.poll()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < held < 2 * 4 * 2_000_000, "of a billion steps it would be gigabytes"


def test_a_verdict_marks_its_ranks_while_it_is_open(tmp_path: Path) -> None:
    path = slow_run(tmp_path / "run")
    live = LiveRun(path)
    live.poll()
    verdict = '{"kind": "slow_rank", "ranks": [2], "since_step": 60, "detected_step": 66, "excess_ratio": 0.3}'
    with (path / "events.jsonl").open("a") as file:
        file.write(f'{{"kind": "verdict", "verdict": {verdict}}}\n')
    assert live.poll()
    assert [rank.verdicts for rank in live.now()] == [(), (), ("slow_rank",), ()]
    with (path / "events.jsonl").open("a") as file:
        file.write(f'{{"kind": "repaired", "verdict": {verdict}}}\n{{"kind": "ended"}}\n')
    live.poll()
    assert [rank.verdicts for rank in live.now()] == [()] * 4
    assert [finding.over for finding in live.findings] == [True]
    assert live.stage == "ended"


@pytest.mark.parametrize(
    "event",
    [
        '{"kind": "stage", "stage": "training", "of": "many"}',
        '{"kind": "stage", "stage": "training", "of": {}}',
        '{"kind": "stage", "stage": "comparison", "done": "half", "of": 2}',
        '{"kind": "verdict", "verdict": {"kind": "slow_rank", "ranks": [99], "since_step": 1, "detected_step": 2,'
        ' "excess_ratio": 0.3}}',
        '{"kind": "verdict", "verdict": {"kind": "slow_rank", "ranks": [1], "since_step": 1, "detected_step": 2,'
        ' "excess_ratio": 0.3, "evidence": {"usual_excess_ratio": "much"}}}',
        '{"kind": "verdict", "verdict": {"kind": "slow_rank", "ranks": [1], "since_step": 1, "detected_step": 2,'
        ' "excess_ratio": -7}}',
        '{"kind": "verdict", "verdict": [1]}',
    ],
)
def test_an_event_that_is_not_what_it_should_be_is_passed_over(tmp_path: Path, event: str) -> None:
    path = write_run(tmp_path / "run", own_times(20, 4))
    (path / "events.jsonl").write_text(event + "\n")
    live = LiveRun(path)
    assert live.poll()
    assert live.steps().tolist() == list(range(20))
    assert live.findings == []


def test_a_price_is_the_same_read_at_once_or_as_the_run_grew(tmp_path: Path) -> None:
    run = slow_run(tmp_path / "run", ranks=4, steps=120, rank=2, onset=60)
    verdict = {
        "kind": "slow_rank", "ranks": [2], "since_step": 60, "detected_step": 70, "excess_ratio": 0.3,
        "cost_rank_seconds": 1.0,
    }  # fmt: skip
    event = json.dumps({"unix": 1.0, "kind": "verdict", "step": 70, "verdict": verdict}) + "\n"
    lines = (run / "steps.jsonl").read_text().splitlines(keepends=True)
    growing = LiveRun(run)
    (run / "steps.jsonl").write_text("".join(lines[: 4 * 72]))
    growing.poll()
    (run / "events.jsonl").write_text(event)
    (run / "steps.jsonl").write_text("".join(lines))
    growing.poll()
    at_once = LiveRun(run)
    at_once.poll()
    (price,) = [finding.cost_rank_seconds for finding in at_once.findings]
    assert price == pytest.approx(1.0 + 49 * 4 * 0.03, rel=0.2)  # each step after it costs four ranks 30 ms
    assert growing.findings[0].cost_rank_seconds == pytest.approx(price, rel=0.05)
    over = {**verdict, "cost_rank_seconds": 5.5}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"unix": 2.0, "kind": "repaired", "step": 119, "verdict": over}) + "\n")
    for live in (growing, at_once):
        live.poll()
        assert [(finding.over, finding.cost_rank_seconds) for finding in live.findings] == [(True, 5.5)]

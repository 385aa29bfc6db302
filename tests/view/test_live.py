from __future__ import annotations

import json
import math
import os
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.monitor.jobs import run_info
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.monitor import StepRecord
from ringside.monitor.run.records import NOTES_KEPT
from ringside.monitor.summary import finish_run
from ringside.view.html.run_report import render_report
from ringside.view.run.follower import LOSSES_KEPT, MOST_STEPS, RECENT_STEPS, RunFollower, progress_text
from ringside.view.run.live import JUDGED_BYTES, LiveRun


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    live = LiveRun(tmp_path / "run")
    assert not live.poll()
    assert live.now() == []
    write_run(tmp_path / "run", own_times(20, 4))
    assert live.poll()
    assert live.ranks == 4
    assert live.recent.steps().tolist() == list(range(20))
    assert live.recent.rows("own_seconds") == pytest.approx(own_times(20, 4), rel=1e-5)
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
    assert live.recent.steps().tolist() == [0, 1, 2]


def test_only_the_newest_steps_are_kept(tmp_path: Path) -> None:
    live = LiveRun(write_run(tmp_path / "run", own_times(100, 2)), steps_kept=32)
    live.poll()
    assert live.recent.steps().tolist() == list(range(68, 100))
    assert live.recent.rows("wait_seconds").shape == (32, 2)


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
    assert (live.ranks, live.recent.steps().tolist(), live.restarts) == (2, list(range(7)), 1)
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
    assert live.recent.steps().tolist() == list(range(20))
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


def record(step: int, rank: int, own: float = 0.1, **more: Any) -> StepRecord:
    return StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=0.2, own_seconds=own, **more)


def begun(ranks: int = 2) -> RunFollower:
    run = RunFollower()
    assert (run.ranks, run.steps, run.progress(), run.rank_medians("own_seconds")) == (0, 0, "0 steps", [])
    run.start(run_info(ranks))
    return run


def test_how_far_a_run_is() -> None:
    cases = [(0, -1, 0), (1, 0, 0), (10, 9, 40), (10, 10, 0), (3, 12, 40)]
    assert [progress_text(*case) for case in cases] == [
        "0 steps", "1 step", "10 steps of at most 40", "10 steps (steps 1 to 10)",
        "3 steps (steps 10 to 12 of at most 40)",
    ]  # fmt: skip
    run = begun()
    run.feed([record(7, 0), record(7, 1), record(9, 0), record(5, 1)], [{"kind": "stage", "of": 40}])
    assert (run.first, run.step, run.steps) == (5, 9, 5)
    run.feed([], [{"kind": "stage", "stage": "training", "of": 40}])
    assert run.progress() == "5 steps (steps 5 to 9 of at most 40)"


def test_figures_are_medians_of_the_newest_steps_and_losses_means_over_ranks() -> None:
    run = begun()
    for step in range(20):
        run.feed([record(step, 0, 1.0 + step, wait_seconds=0.5, loss=1.0), record(step, 1, 5.0, loss=4.0)], [])
    assert RECENT_STEPS == 16
    assert run.rank_medians("own_seconds") == [12.5, 5.0], "steps 4 to 19"
    assert run.rank_medians("wait_seconds") == [0.5, 0.0]
    assert list(run.losses) == [2.5] * 20
    assert run.median("own_seconds") == pytest.approx(np.median([*range(5, 21), *[5] * 16]))
    # late records of older steps, and a step that a newer one closes before all of its ranks are there
    run.feed([record(18, 0, 99.0), record(20, 1, 6.0), record(21, 0, 7.0, loss=3.0), record(21, 1, 7.0)], [])
    assert run.rank_medians("own_seconds")[1] == 5.0
    assert len(run.losses) == 21
    assert run.losses[-1] == 3.0, "of those who know"
    run.feed([record(100 + step, 0, loss=0.0) for step in range(LOSSES_KEPT + 1)], [])
    assert len(run.losses) == LOSSES_KEPT


def test_what_is_exposed_is_that_of_the_rank_that_was_blocked_least() -> None:
    run = begun()
    assert math.isnan(run.exposed_seconds())
    assert math.isnan(run.median("own_seconds"))
    for step, (one, other) in enumerate([(0.3, 0.1), (-1.0, 0.2), (-1.0, -1.0), (0.0, 0.5)]):
        run.feed([record(step, 0, exposed_seconds=one), record(step, 1, exposed_seconds=other)], [])
    assert run.exposed_seconds() == pytest.approx(0.1), "of 0.1, 0.2 and 0"


def test_stages_and_a_comparison() -> None:
    run = begun()
    assert run.stage == "training"
    for done, of, share in ((3, 12, 0.25), (1, 0, 1.0), (0, 5, 0.0)):
        run.feed([], [{"kind": "stage", "stage": "comparison", "done": done, "of": of}])
        assert (run.stage, run.done) == ("comparison", share)
    run.feed([], [{"kind": "stage", "stage": "comparison"}])
    assert run.done == 0.0
    run.feed([], [{"kind": "stage", "stage": "training"}])
    assert run.of == 0
    run.feed([], [{"kind": "comparison", "unix": 1.0, "peer": "gloo"}])
    assert run.comparison == {"peer": "gloo"}


def verdict_event(kind: str = "verdict", *, ranks: list[int], of: str = "slow_rank", **more: Any) -> dict[str, Any]:
    content = {"kind": of, "ranks": ranks, "since_step": 0, "detected_step": 3, "excess_ratio": 0.5, **more}
    return {"kind": kind, "unix": 0.0, "verdict": content}


def test_an_episode_ends_at_the_price_that_was_recorded_and_only_its_own() -> None:
    run = begun(4)
    first, second = verdict_event(ranks=[1]), verdict_event(ranks=[2], cost_rank_seconds=3.0)
    hang = verdict_event(ranks=[3], of="hang", cost_rank_seconds=2.0)
    new = run.feed([], [first, second, hang, verdict_event(ranks=[4])])
    assert [finding.verdict.ranks for finding in new] == [[1], [2], [3]], "there is no rank 4"
    run.feed([], [verdict_event("repaired", ranks=[2], cost_rank_seconds=5.0, evidence={"until_step": 9})])
    assert [(one.over, one.final, one.until_step) for one in run.findings] == [
        (False, 0.0, None), (True, 5.0, 9), (False, 0.0, None),
    ]  # fmt: skip
    assert [one.cost_rank_seconds for one in run.findings] == [0.0, 5.0, 2.0]
    # the same rank again is another episode; what it costs in the end was not recorded
    run.feed([], [verdict_event(ranks=[2], cost_rank_seconds=1.0)])
    run.feed([], [verdict_event("repaired", ranks=[2], evidence={"until_step": "late"})])
    assert [(one.over, one.until_step, one.cost_rank_seconds) for one in run.findings][1::2] == [
        (True, 9, 5.0), (True, None, 1.0),
    ]  # fmt: skip


def test_only_later_steps_add_to_a_price() -> None:
    run = begun()
    run.feed([], [verdict_event(ranks=[1], cost_rank_seconds=1.0)])  # detected at step 3
    price = []
    for step in range(2, 7):
        run.feed([record(step, 0, 0.1), record(step, 1, 0.15)], [])
        price.append(run.findings[0].cost_rank_seconds)
    assert price[:2] == [1.0, 1.0]
    assert np.diff(price[1:]) == pytest.approx([0.1] * 3), "two ranks lose a twentieth of a second in each"


def test_notes_are_kept_as_far_as_they_are_bounded() -> None:
    run = begun()
    event = {
        "kind": "revised",
        "unix": 0.0,
        "step": 3,
        "size_bytes": 8,
        "before": "ring",
        "after": "tree",
        "why": "drift",
    }
    run.feed([], [event] * (NOTES_KEPT + 1))
    assert len(run.revised) in (0, NOTES_KEPT)


def test_late_steps_and_impossible_ranks_are_void_in_the_ring_of_steps(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(40, 2))
    live = LiveRun(path, steps_kept=32)
    live.poll()
    own = live.recent.rows("own_seconds")

    def added(*records: StepRecord) -> bool:
        with (path / "steps.jsonl").open("ab") as file:
            file.writelines(msgspec.json.encode(one) + b"\n" for one in records)
        return live.poll()

    added(record(7, 0, 9.0), record(39, 2, 9.0), record(MOST_STEPS, 0, 9.0))
    assert live.recent.steps().tolist() == list(range(8, 40))
    assert (live.recent.rows("own_seconds") == own).all()
    added(record(39, 1, 9.0), record(8, 0, 8.0))
    assert (live.recent.rows("own_seconds")[-1, 1], live.recent.rows("own_seconds")[0, 0]) == (9.0, 8.0)
    added(record(41, 1, 7.0))  # of the slot that held step 9
    assert live.recent.steps().tolist() == [8, *range(10, 40), 41]
    assert np.isnan(live.recent.rows("own_seconds")[-1, 0])
    assert [rank.step for rank in live.now()] == [39, 41]


def test_a_run_too_large_to_be_judged_again_keeps_the_summary_of_its_end(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(20, 4))
    summary = {**finish_run(path, render_report), "steps": 12345}
    small, large, other, none = (LiveRun(path) for _ in range(4))
    for live in (small, large, other, none):
        live.poll()
    (path / "summary.json").write_text(json.dumps(summary))
    assert small.settle()
    assert small.settled is not None
    assert small.settled["steps"] == 20, "judged from its records"
    assert not small.settle(), "once"
    os.truncate(path / "steps.jsonl", JUDGED_BYTES + 1)  # takes no room on the disk
    assert large.settle()
    assert large.settled == summary
    for live, content in ((other, {**summary, "ranks": summary["ranks"][:3]}), (none, {"steps": 1})):
        (path / "summary.json").write_text(json.dumps(content))
        assert live.settle()
        assert live.settled is None, "it is another job's, or none"

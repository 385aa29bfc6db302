"""What is suspected and not decided, and what would have been found."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ringside.monitor.collector import LOOK_STEPS, StepCollector
from ringside.monitor.run.directory import UNDECIDED, RunReader, RunWriter
from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.slow_rank.detector import Detector
from ringside.monitor.summary import assess_run
from ringside.monitor.undecided import Suspect, Undecided


def noisy(steps: int, ranks: int, jitter: float, seed: int) -> np.ndarray:
    return 0.06 * np.exp(jitter * np.random.default_rng(seed).standard_normal((steps, ranks)))


def test_a_slow_rank_is_suspected_before_it_is_named_and_not_after() -> None:
    for seed in range(10):
        own = noisy(200, 2, 0.15, seed)
        own[100:, 1] *= 1.3
        detector, suspected = Detector(2), []
        for step, row in enumerate(own):
            events = detector.update(row, step=step)
            if events:
                break
            if step > 100:
                suspected += [(step, suspect) for suspect in detector.undecided().suspects]
        assert [event.verdict.ranks for event in events] == [[1]]
        assert 1 in {suspect.rank for _, suspect in suspected}
        last = suspected[-1][1]
        assert last.bar_ratio >= 0.6
        assert 80 <= last.since_step <= 125
        assert 0.1 <= last.excess_ratio <= 0.5
        assert detector.undecided().suspects == []


def test_steadier_jobs_would_have_told_of_less() -> None:
    least = []
    for jitter in (0.02, 0.1, 0.3):
        detector = Detector(4)
        for step, row in enumerate(noisy(300, 4, jitter, 5)):
            detector.update(row, step=step)
        found = detector.undecided().found
        assert set(found) == {24, 80, 128}, "no more than half of the steps"
        least.append(found[24])
    assert 0.05 <= least[0] < least[1] < least[2]


def test_healthy_ranks_are_seldom_suspected_and_the_more_seldom_the_nearer_to_the_bar() -> None:
    detector, suspects = Detector(2), []
    for step, row in enumerate(noisy(4_000, 2, 0.1, 7)):
        detector.update(row, step=step)
        suspects += detector.undecided().suspects
    assert 0 < len(suspects) < 4_000 * 0.1
    for near, often in ((0.6, 200), (0.8, 10_000)):
        said = [suspect.healthy_steps for suspect in suspects if near <= suspect.bar_ratio < near + 0.02]
        assert all(often / 3 < steps < often * 6 for steps in said)
        # Windows of neighbouring steps, and of similar lengths, are nearly the same.
        assert sum(suspect.bar_ratio >= near for suspect in suspects) < 60 * 4_000 / often


def test_what_is_certain_and_holds_up_nobody_is_no_suspicion() -> None:
    rng = np.random.default_rng(2)
    detector = Detector(16, has_parts=True)
    for step in range(200):
        parts = 0.06 * np.array([0.005, 0.25, 0.5, 0.245])[:, None] * np.exp(0.02 * rng.standard_normal((4, 16)))
        if step >= 100:
            parts[0, 3] *= 4  # of the input, a third of a millisecond becomes one
            parts[1, 5] -= 0.006  # time moves from one phase to another
            parts[3, 5] += 0.006
        detector.update(parts.sum(axis=0), step=step, parts=parts, run_delay=np.zeros(16))
        suspects = {suspect.rank for suspect in detector.undecided().suspects if suspect.bar_ratio >= 0.9}
        assert not suspects & {3, 5}
    assert detector.open == []


def test_a_rank_that_joins_late_leaves_no_numbers_that_are_none(tmp_path: Path) -> None:
    detector = Detector(2, has_parts=True)
    for step, row in enumerate(noisy(120, 2, 0.05, 4)):
        detector.update([row[0], row[1] if step >= 60 else np.nan], step=step)
        assert all(np.isfinite(list(detector.undecided().found.values())))


def test_it_is_in_the_run_directory_while_it_goes_on_and_in_the_summary(tmp_path: Path) -> None:
    info = RunInfo(schema=SCHEMA, name="x", started_unix=0.0, world_size=2, engine="gloo")
    collector = StepCollector(2, RunWriter(tmp_path, info))
    own = noisy(4 * LOOK_STEPS, 2, 0.02, 3)
    for step, row in enumerate(own):
        collector.add(
            StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=0.07, own_seconds=float(seconds))
            for rank, seconds in enumerate(row)
        )
    undecided = RunReader(tmp_path).undecided()
    assert undecided is not None
    assert undecided.step >= len(own) - LOOK_STEPS - 1
    assert 24 in undecided.found
    summary, _ = assess_run(RunReader(tmp_path))
    assert summary["undecided"]["found"]["24"] == undecided.found[24]
    assert summary["undecided"]["words"] == undecided.describe()
    (tmp_path / UNDECIDED).write_text("{")
    assert RunReader(tmp_path).undecided() is None


def test_in_words() -> None:
    suspect = Suspect(rank=1, since_step=40, excess_ratio=0.09, bar_ratio=0.8, healthy_steps=12_000)
    assert Undecided(step=60, suspects=[suspect], found={24: 0.18, 80: 0.17, 192: 0.06}).describe() == (
        "rank 1 may be 9.0% slower since step 40: chance gives as much once in 12,000 steps; a rank slower by 18% "
        "would be named within 24 steps, 6.0% within 192"
    )
    assert Undecided(step=3).describe() == ""

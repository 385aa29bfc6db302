"""A rank that is slower than the others is told of where the job is slower by it."""

import numpy as np
import pytest

from ringside.monitor import StepRecord
from ringside.monitor.slow_rank.watcher import SlowRankWatcher


def watched(own, step_seconds):
    """What a watcher tells of own times [steps, ranks] in steps that take as long as is said, [steps]."""
    watcher, told = SlowRankWatcher(own.shape[1]), []
    for step, row in enumerate(own):
        records = {
            rank: StepRecord(
                step=step, rank=rank, ended_unix=0, step_seconds=float(step_seconds[step]), own_seconds=float(seconds)
            )
            for rank, seconds in enumerate(row)
        }
        told += [(step, finding.ended, finding.verdict) for finding in watcher.update(step, records)]
    return told, watcher


@pytest.fixture
def slowed(make_own):
    """0.1 s of own time, of which rank 1 needs 12% more from step 100 on."""
    own = make_own(300, 3)
    own[100:, 1] *= 1.12
    return own


def test_a_rank_is_told_of_whose_excess_is_a_part_of_the_step(slowed):
    ((step, ended, verdict),) = watched(slowed, np.full(300, 0.4))[0]
    assert not ended
    assert step == verdict.detected_step < 115
    assert verdict.ranks == [1]


def test_where_communication_takes_fifty_times_as_long_it_is_not(slowed):
    told, watcher = watched(slowed, np.full(300, 5.0))
    assert told == watcher.open == []


def test_it_is_as_soon_as_that_is_over(slowed):
    ((step, _, verdict),), watcher = watched(slowed, np.where(np.arange(300) < 200, 5.0, 0.2))
    assert 200 <= step == verdict.detected_step <= 216
    assert verdict.since_step == pytest.approx(100, abs=2)
    assert [one.ranks for one in watcher.open] == [[1]]


def test_what_ended_before_it_mattered_is_not_told(slowed):
    slowed[180:, 1] /= 1.12
    assert watched(slowed, np.where(np.arange(300) < 250, 5.0, 0.2))[0] == []


def test_steps_whose_duration_nobody_knows_hide_nothing(slowed):
    ((_, _, verdict),) = watched(slowed, np.full(300, np.nan))[0]
    assert verdict.ranks == [1]


@pytest.mark.parametrize(("step_seconds", "told"), [(0.02, False), (0.06, True)])
def test_a_blip_of_a_fifth_of_a_second_is_not_told(make_own, step_seconds, told):
    """Recorded of a healthy rank on a virtual machine: seven steps of 22 ms took 37."""
    own = make_own(200, 2) * 10 * step_seconds
    own[100:107, 1] *= 1.6
    found, _ = watched(own, own.max(axis=1))
    assert [(finding.ranks, ended) for _, ended, finding in found] == ([([1], False), ([1], True)] if told else [])


def test_short_steps_are_told_of_once_the_excess_has_lasted(make_own):
    own = make_own(300, 2) / 10  # 10 ms
    own[100:, 1] *= 1.6
    ((step, _, verdict),) = watched(own, own.max(axis=1))[0]
    assert step == verdict.detected_step
    assert 0.3 <= own[100 : step + 1].max(axis=1).sum() <= 0.4


def test_what_cost_next_to_nothing_so_far_is_not_told_yet(make_own):
    """Two ranks that lag by turns: a tenth of 20 ms for a dozen steps is 24 ms; a tenth for good is told of."""
    own = make_own(300, 2) / 5
    own[100:114, 1] *= 1.1
    assert watched(own, own.max(axis=1))[0] == []
    own[114:, 1] *= 1.1
    ((step, _, verdict),) = watched(own, own.max(axis=1))[0]
    assert verdict.since_step == pytest.approx(100, abs=2)
    assert 0.05 <= (own[100 : step + 1, 1] - own[100 : step + 1, 0]).sum() <= 0.06

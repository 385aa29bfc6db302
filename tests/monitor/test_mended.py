"""The end of an episode of few ranks: seen soon though single steps are rough, and not before it is there."""

import numpy as np
import pytest
from tests.monitor.recorded import recorded

from ringside.monitor import detect
from ringside.monitor.slow_rank.detector import Detector


def ends(own):
    """The step at which each episode was seen to be over, of an array [steps, ranks]."""
    detector = Detector(own.shape[1])
    return [
        (step, finding.verdict.evidence["until_step"])
        for step, row in enumerate(own)
        for finding in detector.update(row)
        if finding.ended
    ]


def test_a_rank_that_was_mended_is_believed_though_rare_great_steps_go_on():
    """Two recorded ranks of 16 ms; rank 1 took three times as long from step 80 to 96."""
    own = recorded("mended")
    ((seen, until),) = ends(own)
    assert until == 97
    assert seen < 97 + 24
    (verdict,) = detect(own)
    assert (verdict.kind, verdict.ranks, verdict.since_step) == ("slow_rank", [1], 80)
    assert verdict.excess_ratio > 1.5


def quiet(steps: int, seed: int = 3) -> np.ndarray:
    return 0.1 * np.exp(np.random.default_rng(seed).normal(0, 0.01, (steps, 2)))


def test_an_end_that_is_seen_late_is_told_where_it_was():
    """Rank 1 is mended at step 120, and for a hundred steps every other one is rough enough to hide it."""
    own = quiet(400)
    own[80:120, 1] *= 1.5
    own[120:220:2, 1] *= 1.5
    ((seen, until),) = ends(own)
    assert 220 < seen < 330
    assert 120 <= until <= 222


@pytest.mark.parametrize(("late", "of", "is_over"), [(2, 5, False), (1, 10, True)])
def test_who_is_late_in_two_steps_of_five_is_not_mended_and_who_is_in_one_of_ten_is(late, of, is_over):
    own = quiet(300)
    own[80:120, 1] *= 1.5
    own[120:, 1] *= np.where(np.arange(180) % of < late, 1.5, 1.0)
    assert bool(ends(own)) == is_over


def test_nothing_is_said_of_steps_that_are_not_known():
    own = quiet(200)
    own[80:120, 1] *= 1.5
    own[120:, 1] = np.nan
    assert ends(own) == []


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_a_rank_that_stays_slow_is_not_taken_for_mended(correlation):
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(10):
        noise = rng.normal(0, 0.05, (500, 2))
        for step in range(1, 500):
            noise[step] = correlation * noise[step - 1] + np.sqrt(1 - correlation**2) * noise[step]
        noise[100:, 1] += 0.2
        wrong += len(ends(0.1 * np.exp(noise)))
    assert wrong == 0


@pytest.mark.parametrize("seeds", [2, pytest.param(6, marks=pytest.mark.thorough)])
def test_an_episode_that_is_over_does_not_open_another_with_its_own_steps(seeds):
    """Medians of windows that reach into it are late for as long as it lasted."""
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        own = 0.02 * np.exp(rng.normal(0, 0.02, (300, 2)))
        own[80:98, 1] *= 3
        assert [(verdict.ranks, verdict.since_step) for verdict in detect(own)] == [([1], 80)]

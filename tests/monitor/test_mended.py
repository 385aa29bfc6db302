"""The end of an episode of few ranks: seen soon though single steps are rough, and not before it is there."""

import numpy as np
import pytest
from tests.monitor.recorded import recorded

from ringside.monitor import detect
from ringside.monitor.slow_rank import window_test as screen
from ringside.monitor.slow_rank.detector import Detector
from ringside.monitor.slow_rank.window_test import has_recovered


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


def test_an_end_that_is_seen_very_late_is_told_where_it_was():
    """Rank 1 is mended at step 120 and every third step is rough enough to hide it for longer than steps are kept."""
    own = np.full((700, 2), 0.1)
    own[:, 0] *= np.exp(np.random.default_rng(3).normal(0, 0.01, 700))
    own[80:120, 1] *= 1.5
    detector = Detector(2)
    for row in own[:120]:
        detector.update(row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "has_recovered", lambda *_: False)
        patch.setattr(screen, "CERTAIN", np.inf)  # nor is the excess missing for certain
        for row in own[120:400]:
            assert not detector.update(row)
    (finding,) = detector.update(own[400])
    assert finding.verdict.evidence["until_step"] == 120


@pytest.mark.parametrize("correlation", [0.0, 0.6, 0.9])
def test_a_level_at_the_bar_is_not_taken_for_mended(correlation):
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        noise = np.zeros(400)
        for step in range(1, 400):
            noise[step] = correlation * noise[step - 1] + np.sqrt(1 - correlation**2) * rng.normal(0, 0.03)
        wrong += has_recovered(noise[:200], 0.06 + noise[304:], 0.06)
    assert wrong <= 2


def test_who_is_late_in_two_steps_of_five_is_not_mended_and_who_is_in_one_of_ten_is():
    late = np.arange(96)
    assert not has_recovered(np.zeros(60), np.where(late % 5 < 2, 0.5, 0.0), 0.06)
    assert has_recovered(np.zeros(60), np.where(late % 10 < 1, 0.5, 0.0), 0.06)


def test_nothing_is_said_of_steps_that_are_not_known():
    assert not has_recovered(np.zeros(60), np.full(96, np.nan), 0.06)
    assert not has_recovered(np.zeros(60), np.zeros(11), 0.06)
    assert has_recovered(np.empty(0), np.where(np.arange(96) % 2, 0.0, np.nan), 0.06)


@pytest.mark.parametrize("seeds", [2, pytest.param(6, marks=pytest.mark.thorough)])
def test_an_episode_that_is_over_does_not_open_another_with_its_own_steps(seeds):
    """Medians of windows that reach into it are late for as long as it lasted."""
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        own = 0.02 * np.exp(rng.normal(0, 0.02, (300, 2)))
        own[80:98, 1] *= 3
        assert [(verdict.ranks, verdict.since_step) for verdict in detect(own)] == [([1], 80)]

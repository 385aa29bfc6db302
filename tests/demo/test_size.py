from __future__ import annotations

import numpy as np
import pytest

from ringside.demo.size import calibrated_factor, is_at_bound, log_ratios, measure_change, middle

RATIOS = {"independent": 0.0, "alike from step to step": 0.4}


def noise(generator: np.random.Generator, steps: int, alike: float) -> np.ndarray:
    values = 0.05 * np.sqrt(1 - alike**2) * generator.standard_normal(steps)
    for step in range(1, steps):
        values[step] += alike * values[step - 1]
    return values


def job(seed: int, before: int, after: int, size: float, alike: float = 0.0) -> np.ndarray:
    """Own times of two ranks, [steps, 2]; rank 1 becomes slower beside rank 0, which becomes slower too."""
    generator = np.random.default_rng(seed)
    own = 0.1 * np.exp(np.stack([noise(generator, before + after, alike) for _ in range(2)], axis=1))
    own[before:] *= (1.13, 1.13 * (1 + size))
    return own


def test_the_middle_is_the_mean_of_the_middle_half():
    assert middle([9e9, 1.0, 2.0, 0.0]) == 1.5
    assert middle([3.0]) == 3.0
    assert list(middle(np.array([[1.0, 2.0, 3.0, 99.0], [0.0, 0.0, 4.0, 4.0]]))) == [2.5, 2.0]


def test_a_rank_is_held_against_the_median_of_the_others():
    own = np.array([[1.0, 3.0, 2.0, 8.0]])
    assert log_ratios(own, 0) == pytest.approx(np.log(1 / 3))
    assert log_ratios(own, 3) == pytest.approx(np.log(8 / 2))


@pytest.mark.parametrize("effect", [0.6, 0.8, 1.1])
def test_the_factor_is_the_one_at_which_the_size_is_reached(effect: float):
    factors = np.repeat([1.0, 1.3, 1.5], 20)
    ratios = np.log(1.2 * (1 + effect * (factors - 1)))  # it was a fifth slower anyway
    assert calibrated_factor(ratios, list(factors), 0.3) == pytest.approx(1 + 0.3 / effect)


def test_noise_makes_no_factor_absurd():
    factors = [1.0] * 8 + [1.3] * 8
    most, least = (calibrated_factor(np.repeat([0.0, size], 8), factors, 0.3) for size in (0.0, 9.0))
    assert (most, least) == pytest.approx((1.75, 1.15))
    assert is_at_bound(most, 0.3)
    assert is_at_bound(least, 0.3)
    assert not is_at_bound(1.3, 0.3)


@pytest.mark.parametrize("alike", RATIOS.values(), ids=RATIOS)
def test_in_42_steps_of_each_kind_the_size_is_hit(alike: float):
    """Blocks of seven with and without, as the demo trains them; the noise of a quiet machine, and a slow drift."""
    hits = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        factor, factors, ratios = 1.3, list[float](), list[np.ndarray]()
        series = noise(generator, 84, alike) + 0.05 * np.sin(np.arange(84) / 40)
        for block in range(12):
            this = factor if (block + block // 2) % 2 else 1.0
            ratios.append(series[7 * block : 7 * block + 7] + np.log1p(0.7 * (this - 1)))
            factors += [this] * 7
            if block % 4 == 3:
                factor = calibrated_factor(np.concatenate(ratios), factors, 0.3)
        hits += 0.25 <= 0.7 * (factor - 1) <= 0.35
    assert hits >= 95


def test_what_it_came_to_is_read_from_the_records():
    own = job(0, 80, 60, 0.3)
    steps = np.arange(5, 145)
    own[100] = np.nan
    found = measure_change(steps, own, 1, 85)
    assert found is not None
    assert found.relative == pytest.approx(0.3, abs=0.04)
    assert found.own_seconds == pytest.approx((0.1, 0.147), rel=0.05)
    assert found.others_own_seconds == pytest.approx((0.1, 0.113), rel=0.05)
    assert found.steps == (80, 59)
    assert found.relative_interval[0] < found.relative < found.relative_interval[1]


@pytest.mark.parametrize("since", [0, 7, 73, 80, 999])
def test_of_too_few_steps_nothing_is_said(since: int):
    assert measure_change(np.arange(80), job(0, 40, 40, 0.3), 1, since) is None


@pytest.mark.parametrize("alike", RATIOS.values(), ids=RATIOS)
def test_an_interval_holds_the_truth_as_often_as_it_says(alike: float):
    held = 0
    for seed in range(300):
        found = measure_change(np.arange(140), job(seed, 80, 60, 0.3, alike), 1, 80)
        assert found is not None
        low, high = found.relative_interval
        held += low <= 0.3 <= high
    assert 0.92 * 300 <= held < 0.99 * 300


def test_of_few_or_equal_steps_there_is_an_interval_too():
    few = measure_change(np.arange(16), job(0, 8, 8, 0.3), 1, 8)
    assert few is not None
    assert few.relative_interval[0] < 0.3 < few.relative_interval[1]
    equal = measure_change(np.arange(16), np.repeat([[1.0, 1.0], [1.0, 1.3]], 8, axis=0), 1, 8)
    assert equal is not None
    assert equal.relative_interval == pytest.approx((0.3, 0.3))

"""What the detector believes about noise, held against noise whose law is known."""

from __future__ import annotations

import numpy as np
import pytest

from ringside.monitor.slow_rank.noise import CUTS, Noise, learn
from ringside.monitor.slow_rank.window_test import WINDOWS
from ringside.monitor.stats import Floats, log_excess, student

SCALE, Z = 0.02, 3.0


def autoregressive(r: float, steps: int, jobs: int, ranks: int, seed: int = 1) -> Floats:
    """Log excess [steps, jobs, ranks] where own times are an autoregression of 2%."""
    rows = np.random.default_rng(seed).normal(0, SCALE, (steps, jobs, ranks))
    for step in range(1, steps):
        rows[step] = r * rows[step - 1] + np.sqrt(1 - r * r) * rows[step]
    return log_excess(np.exp(rows))


def true_inflation(r: float, window: int) -> float:
    """The variance of the mean of a window over that of independent steps."""
    lags = np.abs(np.subtract.outer(np.arange(window), np.arange(window)))
    return float(window * (r**lags).mean())


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("ranks", [2, 4, 32])
def test_what_means_wander_by_is_true_or_cautious(ranks: int, r: float) -> None:
    windows = np.array([6, 24])
    learnt = learn(autoregressive(r, 500, 24, ranks), windows, Z)
    for window, inflation in zip(windows, np.median(learnt.inflation, axis=(1, 2)), strict=True):
        # Steps that are cut, and the median of the others, correlate less than the noise itself.
        assert 0.75 * true_inflation(r, int(window)) <= inflation <= 2.0 * true_inflation(r, int(window))


@pytest.mark.parametrize("r", [0.0, 0.6])
@pytest.mark.parametrize("steps", [60, 400])
def test_windows_of_healthy_ranks_pass_their_bars_as_seldom_as_is_claimed(steps: int, r: float) -> None:
    jobs, windows = 3000, np.array([8, 24])
    excess = autoregressive(r, steps + 24, jobs, 2)
    noise, above = learn(excess[:steps], windows, Z), []
    for index, window in enumerate(windows):
        over = np.clip(excess[steps : steps + window] - noise.base, -noise.limits[0], noise.limits[0])
        above.append(np.mean(over.sum(axis=0) >= noise.bars[index, 0]))
    assert max(above) <= 0.00135 * 1.5  # one side of three standard deviations


def test_windows_side_by_side_differ_less_where_noise_lasts() -> None:
    windows = np.array([5])
    white, lasting = (learn(autoregressive(r, 400, 16, 4), windows, Z) for r in (0.0, 0.9))
    level = np.median(lasting.bars[0, 1] / lasting.jumps[0])
    assert level > 1.2 * np.median(white.bars[0, 1] / white.jumps[0])


def test_a_skewed_noise_has_higher_bars() -> None:
    rng = np.random.default_rng(2)
    late = 0.1 * (rng.random((400, 8, 16)) < 0.15)
    symmetric = rng.normal(0, SCALE, late.shape) + late * rng.choice([-1, 1], late.shape)
    skewed = rng.normal(0, SCALE, late.shape) + late
    heights = [np.median(bars_over_scatter(rows)) for rows in (symmetric, skewed)]
    assert heights[1] > 1.1 * heights[0]


def bars_over_scatter(rows: Floats) -> Floats:
    noise = learn(rows, np.array([6]), Z)
    scatter = np.clip(rows - np.median(rows, axis=0), -noise.limits[1], noise.limits[1]).std(axis=0)
    return np.asarray(noise.bars[0, 1] / scatter)


def test_nothing_missing_and_nothing_known_are_told_apart() -> None:
    windows = np.array(WINDOWS[0])
    excess = autoregressive(0.0, 60, 2, 4)
    whole = learn(excess, windows, Z)
    excess[::3, :, 1] = np.nan
    gaps = learn(excess, windows, Z)
    assert np.allclose(gaps.limits, whole.limits, rtol=0.2)
    nothing: Noise = learn(np.full((20, 1, 2), np.nan), windows, Z)
    assert np.isfinite(nothing.bars).all()
    assert nothing.bars.shape == (len(windows), len(CUTS) - 1, 1, 2)


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 9.678), (10, 5.694), (30, 4.234), (1e9, 3.719)])
def test_quantiles_of_student(freedom: float, quantile: float) -> None:
    """Tables of t at a tail of 1e-4."""
    assert student(3.719, np.array(freedom)) == pytest.approx(quantile, rel=0.04)

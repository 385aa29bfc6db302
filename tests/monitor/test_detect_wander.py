"""What the detector believes about noise, held against noise whose law is known."""

from __future__ import annotations

import numpy as np
import pytest

from ringside.monitor.slow_rank.noise import MANY, mean_variance
from ringside.monitor.slow_rank.window_test import WINDOWS, WindowTest
from ringside.monitor.stats import log_excess, student


def watched(rows: np.ndarray) -> WindowTest:
    """A screen that has seen log own times [steps, jobs, ranks]."""
    screen = WindowTest(*rows.shape[1:])
    for row in rows:
        screen.update(log_excess(np.exp(row)))
    return screen


def autoregressive(r: float, steps: int, jobs: int, ranks: int) -> np.ndarray:
    rows = np.random.default_rng(1).normal(0, 0.02, (steps, jobs, ranks))
    for step in range(1, steps):
        rows[step] = r * rows[step - 1] + np.sqrt(1 - r * r) * rows[step]
    return rows


@pytest.mark.parametrize("r", [0.0, 0.5, 0.9])
def test_variance_of_a_mean_is_that_of_the_sum_of_autocorrelations(r: float) -> None:
    for window in (1, 6, 24):
        lags = np.abs(np.subtract.outer(np.arange(window), np.arange(window)))
        assert mean_variance(np.array(float(window)), np.array(r)) == pytest.approx((r**lags).mean())


@pytest.mark.parametrize("r", [0.0, 0.9])
@pytest.mark.parametrize("ranks", [4, MANY])
def test_learnt_variances_of_means_are_true_or_cautious(ranks: int, r: float) -> None:
    screen = watched(autoregressive(r, 1_500, 4, ranks))
    windows = np.array(WINDOWS, dtype=float)
    true = mean_variance(windows, np.array(r)) * 0.02**2 * (1.4 if ranks == 4 else 1.03)
    learnt = np.median(screen.noise.variances(), axis=(1, 2))
    assert (learnt >= 0.85 * true).all()
    assert (learnt[:4] <= 2.0 * true[:4]).all()


def test_many_ranks_know_correlated_noise_in_a_hundred_steps() -> None:
    screen = watched(autoregressive(0.9, 110, 3, 128))
    learnt = np.median(screen.noise.variances(), axis=(1, 2))
    true = mean_variance(np.array(WINDOWS, dtype=float), np.array(0.9)) * 0.02**2
    assert (learnt[:3] >= 0.8 * true[:3]).all()
    assert (learnt[:3] <= 2.0 * true[:3]).all()


@pytest.mark.parametrize(("freedom", "quantile"), [(5, 9.678), (10, 5.694), (30, 4.234), (1e9, 3.719)])
def test_quantiles_of_student(freedom: float, quantile: float) -> None:
    """Tables of t at a tail of 1e-4."""
    assert student(3.719, np.array(freedom)) == pytest.approx(quantile, rel=0.04)

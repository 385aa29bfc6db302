"""Own times of equal ranks, as different kinds of noise make them."""

from __future__ import annotations

import numpy as np


def noisy_times(kind: str, steps: int, ranks: int, seed: int) -> np.ndarray:
    """Own times of equal ranks, seconds, float64 [steps, ranks]."""
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.03, (steps, ranks))
    if kind == "steps differ":
        noise += random.normal(0, 0.5, (steps, 1))
    elif kind == "interrupted":
        noise += (random.random((steps, ranks)) < 0.35) * random.exponential(0.4, (steps, ranks))
    elif kind == "a slow stretch":
        for rank in range(0, ranks, 2):
            begin = random.integers(0, steps)
            noise[begin : begin + steps // 4, rank] += random.uniform(0.1, 0.8)
    times: np.ndarray = 0.1 * np.exp(noise)
    return times


KINDS = ["even", "steps differ", "interrupted", "a slow stretch"]

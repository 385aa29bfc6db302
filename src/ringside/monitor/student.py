"""How many estimated standard deviations are as rare as so many known ones."""

from __future__ import annotations

import numpy as np

from ringside.monitor.excess import Floats


def student(z: float, freedom: Floats) -> Floats:
    """Return how many estimated standard deviations are as rare as `z` known ones, by freedom of the estimate.

    The quantile of Student's t in Wallace's approximation (1959).
    """
    raised = z * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    quantile: Floats = np.sqrt(freedom * np.expm1(np.minimum(raised**2 / freedom, 60.0)))
    return quantile

"""A cluster at another scale: what was measured beside the law of one scale is expected beside the law of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ringside.predict.laws.calibrate import Calibration, Floats
from ringside.predict.laws.fabric import Law


def transfer(fitted: Sequence[Calibration], law: Law) -> Law:
    """Return what is expected at another scale of a cluster that was measured at one or more.

    What the measured scales had beside their laws, the new one has beside its own, as far as they show it.

    Args:
        fitted: Calibrations of tables of the same cluster, each fitted with the law of its own scale.
        law: The law of the scale to predict.
    """
    drift = np.diag(law.backbone.drift**2)
    beside, precision = np.zeros(len(law.mean)), np.zeros((len(law.mean), len(law.mean)))
    for scale in fitted:
        known = np.linalg.inv(posterior(scale) + drift)
        # What the rows moved the law's figures by, in the linear model.
        beside += known @ (np.diag(scale.law.spread**2) @ scale.slopes.T @ scale.pull)
        precision += known
    spread = np.linalg.inv(precision)
    return replace(
        law,
        mean=law.mean + spread @ beside,
        spread=np.minimum(np.sqrt(np.diag(spread + drift)), law.spread),
        noise=float(np.exp(np.mean([np.log(scale.scale) for scale in fitted]))),
        words=f"{law.words}; beside it what {len(fitted)} other scale{'s' * (len(fitted) > 1)} had",
    )


def posterior(calibration: Calibration) -> Floats:
    """Return the covariance of the figures given the rows, float64 [k, k]."""
    prior = np.diag(calibration.law.spread**2)
    toward = prior @ calibration.slopes.T
    covariance: Floats = prior - toward @ calibration.inverse @ toward.T
    return covariance

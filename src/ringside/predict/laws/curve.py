"""The time of a collective over its size: latency, pipeline fill, bandwidth. Four figures, each with a meaning.

A collective that forwards its tensor in segments over h hops takes h·α + S/B, and the pipeline's fill. With the best
segment length the fill is 2·sqrt(h·α·S/B) (Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication:
theory, practice, and experience", 2007); a library grows its segments only up to a largest one, and from there on the
fill stays what it is. With u = S/(B·t0) the ratio of the bytes' time to the latency:

    t(S) = t0 · (1 + u + ramp·√u / (1 + ramp·√u/depth))

`ramp` is how steeply the fill grows, `depth` where it ends, both in units of t0. Protocols and channel counts that
change with the size follow the same curve up to bumps, which `calibrate.py` keeps as what they are.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

BASE, RAMP, DEPTH, RATE = range(4)


class Backbone(Protocol):
    """A time over sizes with a few figures, of which logarithms are fitted."""

    @property
    def drift(self) -> Floats:
        """How much each figure differs between scales of one cluster beyond its law: standard deviations [k]."""

    def log_slopes(self, theta: Floats, sizes: ArrayLike) -> tuple[Floats, Floats]:
        """Return the logarithm of the time and its derivatives by `theta`: float64 [n], [n, k]."""


class PipelineLaw:
    """The curve of this module, as a backbone: four figures."""

    @property
    def drift(self) -> Floats:
        """Latency, ramp, depth and rate."""
        return np.array([0.20, 0.20, 0.20, 0.12])

    def log_slopes(self, theta: Floats, sizes: ArrayLike) -> tuple[Floats, Floats]:
        """Return the logarithm of the time and its derivatives.

        Args:
            theta: Logarithms of t0 (seconds), ramp, depth and B (bytes per second), float64 [4].
            sizes: Bytes, more than 0, [n].

        Returns:
            float64 [n], of seconds; float64 [n, 4].
        """
        base, ramp, depth, rate = np.exp(theta)
        u = np.asarray(sizes, dtype=np.float64) / (rate * base)
        root = np.sqrt(u)
        bent = 1.0 + ramp * root / depth
        fill = ramp * root / bent
        total = 1.0 + u + fill
        by_root = fill / (root * bent)  # d fill / d root, and half of it per d log u
        slopes = np.empty((len(u), 4))
        slopes[:, RATE] = -(u + 0.5 * root * by_root) / total
        slopes[:, BASE] = 1.0 + slopes[:, RATE]
        slopes[:, RAMP] = root * by_root / total
        slopes[:, DEPTH] = (fill - root * by_root) / total
        return np.log(base * total), slopes


PIPELINE = PipelineLaw()

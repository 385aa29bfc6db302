"""How gradients are best cut into buckets: what of their synchronisation backward hides, and what is left exposed.

Backward takes C seconds and fills k equal buckets evenly: bucket i is ready at i·C/k. Buckets are reduced one after
the other, t(S/k) each. The last is done when the slowest chain is: all of them one after the other from the first on,
or the last alone. So with k buckets

    exposed(k) = max(C/k + k·t(S/k) - C, t(S/k))

With t(b) = α + b/B that is max(C/k + k·α + S/B - C, α + S/(k·B)): many buckets cost latency, few hide little. Best is
what is expected to leave least, over the whole band: where small buckets' latency is little known, many of them may
leave far more than the middle suggests. Of counts within `NEAR` of the step's computation of the least, the fewest
buckets are best. The same reckoning as in S. Li et al., "PyTorch Distributed: Experiences on
accelerating data parallel training", VLDB 2020, section 4.2.3, whose first bucket starts while backward goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.options import Option

BACKWARD = 2.0 / 3.0  # of a step's computation: backward multiplies twice what forward does (J. Kaplan et al., 2020)
LEAST_BUCKET = 1024.0
NEAR = 0.002
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)


@dataclass(frozen=True)
class BucketSizes:
    """A number of buckets, and what is left exposed with it.

    Args:
        count: k.
        bucket_bytes: S/k.
        bucket: One bucket's all-reduce.
        exposed: What is left after backward.
        whole: Exposed with one bucket: nothing is hidden.
    """

    count: int
    bucket_bytes: float
    bucket: Band
    exposed: Band
    whole: Band

    @property
    def expected_s(self) -> float:
        """What is expected to be left, seconds: the middle, and the band's ends as seldom as what lies outside it."""
        return 0.9 * self.exposed.value + 0.05 * (self.exposed.low + self.exposed.high)


def exposed_s(count: int, bucket_s: float, backward_s: float) -> float:
    """Return what is left of `count` buckets of `bucket_s` seconds each after a backward of `backward_s`: see above."""
    return max(backward_s / count + count * bucket_s - backward_s, bucket_s)


def best_buckets(
    option: Option, size_bytes: float, compute_s: float, counts: Sequence[int] = COUNTS
) -> tuple[BucketSizes, ...]:
    """Return the best number of buckets first, then the others by what they are expected to leave.

    The band is that of the times: they are wrong together, by the same figures.

    Args:
        option: The algorithm.
        size_bytes: S, of all gradients, more than 0.
        compute_s: Of forward and backward together, seconds; `BACKWARD` of it hides buckets.
        counts: Numbers of buckets to try, 1 among them.

    Raises:
        UsageError: The computation takes no time.
    """
    if not (math.isfinite(compute_s) and compute_s > 0):
        raise UsageError(f"--compute-seconds {compute_s:g}: seconds of forward and backward, more than 0")
    backward = BACKWARD * compute_s
    tried = [k for k in counts if k == 1 or size_bytes / k >= LEAST_BUCKET]
    bands = option.predict(size_bytes / np.array(tried, dtype=np.float64)).bands
    whole = bands[tried.index(1)]
    found = []
    for count, bucket in zip(tried, bands, strict=True):
        left = Band(*(exposed_s(count, seconds, backward) for seconds in bucket.ends))
        found.append(BucketSizes(count, size_bytes / count, bucket, left, whole))
    enough = min(sizes.expected_s for sizes in found) + NEAR * compute_s
    return tuple(sorted(found, key=lambda sizes: (max(sizes.expected_s, enough), sizes.count)))

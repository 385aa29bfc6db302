"""What collectives cost apart from their bytes, and which bucket size would cost least. Pure."""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import combinations
from operator import attrgetter
from statistics import median
from typing import NamedTuple

KEPT = 32
"""Backward passes that are remembered of a size class."""

LEAST_KEPT = 8
"""A size class with fewer is not judged."""

EVERY = 16
"""Backward passes between two estimates, once there is one ..."""

AT_FIRST = 4
"""... and before: DDP's first pass has one large bucket, so that a size class may begin with the second."""

APART = 4.0
"""Sizes must differ by this factor for a line to be drawn through what they take."""

SMALL_BYTES = 64 << 10
USUAL_WIRE = 500e6
"""Where all collectives have about one size, no line can be drawn. Up to `SMALL_BYTES`, their bytes are then taken to
cross twice (reduced and spread again) at so many bytes per second, as on a network of 5 Gbit/s."""


class CollectiveSpan(NamedTuple):
    """One collective: hand-over and result, seconds on one clock, and its tensor's bytes."""

    began: float
    ended: float
    size_bytes: int


class CollectiveMeter:
    """Estimates from the collectives of each backward pass what one takes whatever its size, on this rank.

    Collectives queue behind each other, so the one before must have ended for the time of the next to count. Some end
    in pairs, as two threads carry them: of each size class (a power of two) a pass gives one mean. The first collective
    of a pass holds what others are late, and is left out. Any thread may add a pass.

    Attributes:
        latency_seconds: What one collective takes apart from its bytes; 0: not known (yet).
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self.latency_seconds = 0.0
        self._classes: defaultdict[int, deque[tuple[float, float]]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._usual: dict[int, float] = {}
        self._passes = 0

    def add(self, spans: Iterable[CollectiveSpan]) -> float:
        """Take in the collectives of one backward pass; return what they took one after the other, seconds.

        Of the first no more is counted than is usual for its size: what is beyond that is others being late.
        """
        with self._guard:
            before, busy = -math.inf, 0.0
            found: dict[int, tuple[int, int, float]] = {}  # by class: how many, their bytes, their seconds
            ordered = sorted(spans, key=attrgetter("ended"))
            for number, (began, ended, size) in enumerate(ordered):
                took, before, kind = ended - max(began, before), ended, size.bit_length()
                busy += took if number else min(took, self._usual.get(kind, took))
                if number or len(ordered) == 1:
                    count, total, seconds = found.get(kind, (0, 0, 0.0))
                    found[kind] = count + 1, total + size, seconds + took
            for kind, (count, total, seconds) in found.items():
                self._classes[kind].append((total / count, seconds / count))
            self._passes += 1
            if self._passes % (EVERY if self._passes > EVERY else AT_FIRST) == 0:
                self.latency_seconds = self._estimate_latency()
            return busy

    def _estimate_latency(self) -> float:
        """Return where the line through what size classes take meets no bytes at all, seconds.

        Its slope is the median over pairs of classes far enough apart (Theil 1950).
        """
        medians = {}  # of sizes and times, by class
        for kind, kept in self._classes.items():
            if len(kept) >= LEAST_KEPT:
                sizes, times = zip(*kept, strict=True)
                medians[kind] = float(median(sizes)), float(median(times))
        self._usual = {kind: took for kind, (_, took) in medians.items()}
        points = sorted(medians.values())
        if not points:
            return 0.0
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] >= APART * a[0]]
        size, took = points[0]
        if not slopes:
            return max(took - 2.0 * size / USUAL_WIRE, 0.0) if size <= SMALL_BYTES else 0.0
        return max(took - max(median(slopes), 0.0) * size, 0.0)


class BucketCosts(NamedTuple):
    """Which buckets would cost least.

    Args:
        collectives: How many per step.
        bucket_bytes: Of which size.
        saved_seconds: What they save per step.
        saved_ratio: Which share that is of the time in which collectives are under way.
    """

    collectives: int
    bucket_bytes: float
    saved_seconds: float
    saved_ratio: float


def best_buckets(collectives: float, payload_bytes: float, busy_seconds: float, latency_seconds: float) -> BucketCosts:
    """Return the buckets with which least of a step's synchronisation is left after backward.

    With k buckets k latencies are paid, and the last bucket, a k-th of all bytes, has no backward left to hide behind:
    k·a + T/k is least at k = sqrt(T/a), where a is the latency and T what the bytes alone take.

    Args:
        collectives: Per step.
        payload_bytes: Of all of them.
        busy_seconds: What they take one after the other.
        latency_seconds: What one takes apart from its bytes.
    """
    if not (collectives >= 1 and payload_bytes > 0 and busy_seconds > 0 and latency_seconds > 0):
        return BucketCosts(max(int(collectives), 0), payload_bytes / max(collectives, 1.0), 0.0, 0.0)
    transfer = max(busy_seconds - collectives * latency_seconds, 0.0)
    best = min(max(round(math.sqrt(transfer / latency_seconds)), 1), int(collectives))
    saved = min((collectives - best) * latency_seconds, busy_seconds)
    return BucketCosts(best, payload_bytes / best, saved, saved / busy_seconds)


def bucket_mb(bucket_bytes: float) -> int:
    """Return a size for DDP's `bucket_cap_mb`: whole MiB, which is what DDP means by MB, at least 1."""
    return max(math.ceil(bucket_bytes / (1 << 20)), 1)

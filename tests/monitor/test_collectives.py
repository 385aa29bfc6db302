"""What collectives take apart from their bytes, and the bucket size that follows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringside.monitor.job.collectives import CollectiveMeter, CollectiveSpan, best_buckets, bucket_mb


def one_pass(sizes: list[int], latency: float, bytes_per_s: float, noise: np.random.Generator) -> list[CollectiveSpan]:
    """A backward pass that hands over everything at once: collectives queue, and some wait for a late rank."""
    spans, now = [], 0.0
    for size in sizes:
        now += (latency + size / bytes_per_s) * (1 + 0.05 * noise.random())
        now += (not spans and noise.random() < 0.9) * 30 * latency
        spans.append(CollectiveSpan(0.0, now, size))
    return spans


def test_the_latency_is_told_from_the_bytes_though_some_wait_for_a_late_rank() -> None:
    meter, noise = CollectiveMeter(), np.random.default_rng(0)
    sizes = [10_000] * 6 + [500_000] * 3 + [4_000_000]
    for _ in range(20):
        busy = meter.add(one_pass(sizes, 400e-6, 1e9, noise))
    assert meter.latency_seconds == pytest.approx(400e-6, rel=0.15)
    assert busy >= 10 * 400e-6 + sum(sizes) / 1e9


def test_collectives_that_end_in_pairs_take_what_they_take_on_average() -> None:
    meter = CollectiveMeter()
    for _ in range(20):
        meter.add([CollectiveSpan(0.0, 1e-3 * (number // 2 + 1), 1000) for number in range(61)])
    assert meter.latency_seconds == pytest.approx(0.5e-3, rel=0.05)


def test_others_being_late_is_not_what_collectives_take() -> None:
    meter, late = CollectiveMeter(), 0.5
    for _ in range(20):
        busy = meter.add([CollectiveSpan(0.0, late + 1e-3 * (number + 1), 1000) for number in range(10)])
    assert busy == pytest.approx(10e-3, rel=0.01)


def test_gaps_between_collectives_are_not_busy() -> None:
    assert CollectiveMeter().add(
        [CollectiveSpan(0.0, 1.0, 8), CollectiveSpan(0.5, 2.0, 8), CollectiveSpan(5.0, 6.0, 8)]
    ) == pytest.approx(3.0)
    assert CollectiveMeter().add([]) == 0.0


@pytest.mark.parametrize(("size", "known"), [(8_000, True), (32_000, True), (25_000_000, False)])
def test_where_all_have_one_size_only_small_ones_tell(size: int, known: bool) -> None:
    meter, noise = CollectiveMeter(), np.random.default_rng(1)
    for _ in range(20):
        meter.add(one_pass([size] * 12, 1e-3, 1e9, noise))
    assert (meter.latency_seconds > 0) is known
    assert meter.latency_seconds <= 1.3e-3


def test_ever_larger_collectives_have_no_negative_latency() -> None:
    meter = CollectiveMeter()
    for _ in range(20):
        meter.add(
            [
                CollectiveSpan(0.0, 1e-6, 1000),
                CollectiveSpan(1.0, 1.0 + 1e-6, 1000),
                CollectiveSpan(2.0, 2.5, 1_000_000),
            ]
        )
    assert meter.latency_seconds == 0.0


def test_two_hundred_tiny_buckets_become_a_few() -> None:
    best = best_buckets(200, 10e6, busy_seconds=200 * 300e-6 + 10e-3, latency_seconds=300e-6)
    assert best.collectives == 6  # sqrt(10 ms / 0.3 ms)
    assert best.saved_seconds == pytest.approx(194 * 300e-6)
    assert best.saved_ratio == pytest.approx(0.83, abs=0.01)
    assert bucket_mb(best.bucket_bytes) == 2


def test_few_large_buckets_stay() -> None:
    best = best_buckets(4, 100e6, busy_seconds=0.1, latency_seconds=300e-6)
    assert (best.collectives, best.saved_seconds) == (4, 0.0)
    assert best_buckets(100, 1e6, busy_seconds=0.1, latency_seconds=0.0).saved_seconds == 0.0
    assert best_buckets(0, 0.0, 0.0, 0.0).collectives == 0


@given(
    count=st.integers(1, 5000),
    payload=st.floats(1, 1e10),
    transfer=st.floats(0, 10),
    latency=st.floats(1e-7, 1e-2),
)
def test_no_other_number_of_buckets_leaves_less(count: int, payload: float, transfer: float, latency: float) -> None:
    best = best_buckets(count, payload, count * latency + transfer, latency)

    def left(buckets: int) -> float:
        return buckets * latency + transfer / buckets

    assert 1 <= best.collectives <= count
    for other in {max(best.collectives - 1, 1), min(best.collectives + 1, count)}:
        assert left(best.collectives) <= left(other) * 1.03
    assert 0 <= best.saved_ratio <= 1

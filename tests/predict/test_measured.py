"""What a run measured moves all that is said of its hardware, and alike."""

import numpy as np
import pytest

from ringside.predict import LinkClass, Topology, preset
from ringside.predict.plan.buckets import best_buckets
from ringside.predict.plan.options import moved, option, options, tilted, with_measured
from ringside.predict.plan.plan import PlanQuestion, plan

FLAT = Topology("flat", (1,) * 4, between=LinkClass("ethernet", 30e-6, 1e9))


def middle(one, size):
    return float(one.predict([size]).times_s[0])


@pytest.mark.parametrize(("topology", "name"), [(FLAT, "ring"), (preset("dgx-h100", 2), "ring")])
@pytest.mark.parametrize("times", [0.2, 1.0, 20.0])
def test_one_measured_size_moves_everything_by_its_pace(topology, name, times):
    plain = option(topology, name)
    took = times * middle(plain, 1e6)
    seen = with_measured(plain, ((1e6, took),))
    assert seen.pace == pytest.approx(times)
    for size in (1e3, 1e6, 1e9):
        assert middle(seen, size) == pytest.approx(times * middle(plain, size), rel=0.01)
    for other in options(topology):
        assert middle(moved(other, seen), 1e6) == pytest.approx(times * middle(other, 1e6), rel=0.05)


def test_two_sizes_tell_latency_from_wire():
    plain = option(FLAT, "ring")
    seen = with_measured(plain, ((8.0, 10 * middle(plain, 8.0)), (1e8, middle(plain, 1e8))))
    assert middle(seen, 100.0) > 5 * middle(plain, 100.0)
    assert middle(seen, 1e9) < 2 * middle(plain, 1e9)


def test_nothing_measured_moves_nothing():
    plain = option(FLAT, "ring")
    assert with_measured(plain, ()) is plain
    assert moved(plain, with_measured(plain, ())) is plain


def test_a_tilt_trades_latency_for_wire():
    plain = option(FLAT, "ring")
    more = tilted(plain, 1.0)
    assert middle(more, 8.0) > middle(plain, 8.0)
    assert middle(more, 1e9) < middle(plain, 1e9)


def test_what_a_plan_says_of_one_thing_is_one_number():
    found = plan(PlanQuestion(FLAT, 1e7, compute_s=0.05, measured=((1e7, 0.4),), ran=1))
    (row,) = [one for one in found.here if one.algorithm == found.priced.algorithm]
    assert row.seconds == found.priced.seconds == found.scaling[-1].seconds
    assert found.here[0].seconds.value == pytest.approx(0.4, rel=0.1)
    assert 1 in {one.count for one in found.buckets}


def test_little_known_latency_is_no_reason_for_many_buckets():
    """By the middle alone 32 buckets are best; at the band's upper end they cost far more than they hide."""
    plain = option(Topology("slow", (1, 1), between=LinkClass("ethernet", 1e-4, 1e9)), "ring")
    seen = with_measured(plain, ((2e5, 5e-3),))
    best, *_ = found = best_buckets(seen, 2e5, 0.016)
    by_middle = min(found, key=lambda one: (one.exposed.value, one.count))
    assert best.count < by_middle.count
    assert best.exposed.high < by_middle.exposed.high
    assert best.expected_s == pytest.approx(np.dot(best.exposed.ends, (0.9, 0.05, 0.05)))


def test_many_small_buckets_whose_latency_was_measured_become_few():
    """10 ms of latency each: 400 buckets leave 3.7 s, and 24 of them 14 ms."""
    seen = with_measured(option(FLAT, "ring"), ((8.0, 0.01), (5e5, 0.01025)))
    assert best_buckets(seen, 2e8, 0.6)[0].count <= 64

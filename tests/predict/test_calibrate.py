"""A known law and noise come back out of a fit; bands hold what they say; nothing depends on chance or order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import expect, fit, transfer, vague
from ringside.predict.laws.fabric import BASE, PIPELINE, RATE, Law
from ringside.predict.laws.knowledge import Knowledge

from .shared_tables import made

SIZES = 2.0 ** np.arange(3, 34)
THETA = np.log([25e-6, 2.5, 6.0, 180e9])
LAW = Law(np.log([35e-6, 2.0, 7.0, 150e9]), np.array([0.4, 0.5, 0.5, 0.2]), "a law near it")


def rows(table):
    return np.array([r.size_bytes for r in table.rows]), np.array([r.time_s for r in table.rows])


figures = st.tuples(st.floats(-13, -7), st.floats(-1, 2), st.floats(0, 4), st.floats(20, 28))


@given(figures, st.floats(1, 1e12))
def test_the_slopes_of_the_curve_are_its_derivatives(theta, size):
    theta = np.array(theta)
    _, slopes = PIPELINE.log_slopes(theta, [size])
    for k in range(4):
        step = 1e-5 * np.eye(4)[k]
        numeric = (PIPELINE.log_slopes(theta + step, [size])[0] - PIPELINE.log_slopes(theta - step, [size])[0]) / 2e-5
        assert slopes[0, k] == pytest.approx(numeric[0], abs=1e-6)


@given(figures)
def test_time_grows_with_size_and_the_rate_saturates(theta):
    times = np.exp(PIPELINE.log_slopes(np.array(theta), SIZES)[0])
    assert np.all(np.diff(times) > 0)
    assert np.all(np.diff(SIZES / times) > 0)
    assert np.all(SIZES / times < np.exp(theta[RATE]))
    assert np.all(times > np.exp(theta[BASE]))


@pytest.mark.parametrize("law", [LAW, vague(0)])
def test_a_known_law_is_recovered(law):
    sizes, times = rows(made(THETA, SIZES, noise=0.03, seed=1))
    found = fit(sizes, times, law)
    assert np.exp(found.theta[BASE]) == pytest.approx(25e-6, rel=0.05)
    assert np.exp(found.theta[RATE]) == pytest.approx(180e9, rel=0.07)
    truth = np.exp(PIPELINE.log_slopes(THETA, SIZES)[0])
    assert np.abs(found.predict(SIZES).times_s / truth - 1).mean() < 0.03


def test_small_sizes_and_the_hardware_tell_the_large_ones():
    sizes, times = rows(made(THETA, SIZES, noise=0.03, seed=2))
    small = sizes <= 16 << 20
    told = fit(sizes[small], times[small], LAW).predict(sizes[~small])
    assert np.abs(told.times_s / times[~small] - 1).mean() < 0.15
    assert told.covers(times[~small]).all()
    assert told.extrapolated.all()
    width = told.high_s / told.times_s
    assert width[-1] > 1.2 * (fit(sizes, times, LAW).predict(sizes[-1:]).high_s / times[-1:])[0]


def test_an_outlier_hardly_moves_the_rest():
    sizes, times = rows(made(THETA, SIZES, noise=0.02, seed=3))
    bad = times.copy()
    bad[12] *= 4
    others = np.abs(np.arange(len(sizes)) - 12) > 2
    straight, bent = fit(sizes, times, LAW).predict(sizes), fit(sizes, bad, LAW).predict(sizes)
    assert np.abs(bent.times_s / straight.times_s - 1)[others].max() < 0.06


def test_the_band_holds_about_95_percent_of_rows_that_were_held_out():
    hits = []
    for seed in range(30):
        noise = (0.01, 0.03, 0.06)[seed % 3]
        sizes, times = rows(made(THETA, SIZES, noise=noise, seed=seed))
        hits.append(fit(sizes[::2], times[::2], LAW).predict(sizes[1::2]).covers(times[1::2]))
    assert 0.90 <= np.concatenate(hits).mean() <= 0.999


def test_noisier_tables_have_wider_bands():
    def width(noise):
        sizes, times = rows(made(THETA, SIZES, noise=noise, seed=5))
        told = fit(sizes[::2], times[::2], LAW).predict(sizes[1::2])
        return float(np.median(told.high_s / told.times_s))

    assert width(0.15) > 1.1 * width(0.01)


def test_a_dense_tables_band_is_wider_where_its_rows_scatter_more():
    """Jitter of 3 us: a tenth of a small message's time, nothing of a large one's."""
    random = np.random.default_rng(5)
    sizes = np.linspace(1 << 14, 1 << 26, 600)
    truth = np.exp(PIPELINE.log_slopes(THETA, sizes)[0])
    times = np.abs(truth + 3e-6 * random.standard_normal(600)) * np.exp(0.002 * random.standard_normal(600))
    told = fit(sizes[::2], times[::2], LAW).predict(sizes[1::2])
    widths, held = told.high_s / told.times_s - 1, told.covers(times[1::2])
    assert widths[:30].mean() > 1.5 * widths[-100:].mean()
    assert held.mean() > 0.9
    assert held[:30].mean() > 0.75


def test_of_two_ends_of_the_search_the_one_counts_that_needs_less_noise():
    """The law is far off. From its figures the search ends at a curve that the rows lie farther from."""
    sizes = [19, 62, 515, 11028, 33418145, 776044207, 1877538260]
    times = [6.81e-06, 6.56e-06, 7.26e-06, 6.1e-06, 0.000126, 0.0016, 0.00404]
    far_off = Law(np.array([-17.2, 2.08, 1.68, 23.73]), np.array([1.6, 2.0, 2.0, 0.8]), "far off", noise=5.0)
    assert fit(sizes, times, far_off).scale < 3.2  # the other end's is 3.6


def test_a_fit_is_the_same_every_time():
    sizes, times = rows(made(THETA, SIZES, noise=0.05, seed=6))
    once, again = fit(sizes, times, LAW), fit(sizes, times, LAW)
    assert np.array_equal(once.theta, again.theta)
    assert np.array_equal(once.predict(SIZES).high_s, again.predict(SIZES).high_s)


def test_many_rows_are_thinned_not_refused():
    sizes = np.arange(1, 3001) * 8192.0
    found = fit(sizes, np.exp(PIPELINE.log_slopes(THETA, sizes)[0]), LAW)
    assert len(found.x) == 400
    assert found.x[[0, -1]] == pytest.approx(np.log2(sizes[[0, -1]]))  # from end to end
    assert found.predict([1e6]).times_s[0] == pytest.approx(np.exp(PIPELINE.log_slopes(THETA, [1e6])[0])[0], rel=0.02)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 1e11), st.floats(1e-7, 10)), min_size=1, max_size=6))
def test_any_positive_rows_give_finite_bands_around_the_time(pairs):
    sizes, times = np.array(pairs).T
    told = fit(sizes, times, vague(0)).predict([8.0, 1e6, 1e15])
    assert np.all(np.isfinite(told.high_s))
    assert np.all(told.low_s > 0)
    assert np.all((told.low_s < told.times_s) & (told.times_s < told.high_s))


@pytest.mark.parametrize(("sizes", "times"), [([], []), ([8], [1, 2]), ([0], [1]), ([8], [0]), ([8], [float("nan")])])
def test_figures_that_cannot_be_are_refused(sizes, times):
    with pytest.raises(UsageError):
        fit(sizes, times, LAW)
    with pytest.raises(UsageError):
        expect(LAW).predict([0])


def test_without_rows_the_law_is_the_prediction():
    told = expect(LAW).predict(SIZES)
    assert told.times_s == pytest.approx(np.exp(PIPELINE.log_slopes(LAW.mean, SIZES)[0]))
    assert told.extrapolated.all()


def test_what_one_scale_has_beside_its_law_another_has_too():
    shift = np.array([0.5, 0.0, 0.0, -0.3])
    sizes, times = rows(made(LAW.mean + shift, SIZES, noise=0.01))
    there = Law(LAW.mean + np.array([0.7, 0.0, 0.0, -0.7]), LAW.spread, "twice as large")
    moved = transfer([fit(sizes, times, LAW)], there)
    assert moved.mean - there.mean == pytest.approx(shift, abs=0.12)
    assert np.all(moved.spread <= LAW.spread)
    assert moved.spread[BASE] < 0.3
    two = transfer([fit(sizes, times, LAW)] * 2, there)
    assert np.all(two.spread <= moved.spread + 1e-12)


def test_rows_make_the_figures_more_certain():
    sizes, times = rows(made(THETA, SIZES, noise=0.03))
    assert np.all(np.diag(fit(sizes, times, LAW).posterior) < LAW.spread**2)


def test_the_vague_law_knows_how_ranks_count():
    assert vague(1024).mean[BASE] > vague(2).mean[BASE]
    assert vague(1024).mean[RATE] < vague(2).mean[RATE]


def test_a_named_jump_among_the_rows_says_nothing_of_sizes_beyond_them():
    times = np.exp(PIPELINE.log_slopes(THETA, SIZES)[0]) * np.where(SIZES > 2**18.5, 1.6, 1.0)
    small = SIZES <= 1 << 22
    jumps = fit(SIZES[small], times[small], replace(LAW, switches=(18.5,)))
    plain = fit(SIZES[small], times[small], LAW)
    assert jumps.law.switches == (18.5,)
    told, without = jumps.predict(SIZES), plain.predict(SIZES)
    assert told.times_s[~small] == pytest.approx(without.times_s[~small], rel=1e-9)
    assert told.high_s[~small] == pytest.approx(without.high_s[~small], rel=1e-9)
    assert np.abs(told.times_s / without.times_s - 1)[small].max() > 0.01


@pytest.mark.parametrize("fall", [1.0, 0.9, 0.5])
def test_the_answer_for_a_size_does_not_depend_on_those_asked_with_it(fall):
    """Rows of which one is faster than a smaller one: by less than a regime's fall, and by more."""
    sizes = 2.0 ** np.arange(10, 27, 2)
    times = np.exp(PIPELINE.log_slopes(THETA, sizes)[0]) * np.where(sizes >= 1 << 14, fall, 1.0)
    found = fit(sizes, times, LAW)
    beside = expect(transfer([found], replace(LAW, place=(3.0, LAW.place[1]))))
    assert beside.law.beside is not None
    asked = 2.0 ** np.arange(3, 40, 0.05)
    for one in (found, beside):
        batch = one.predict(asked)
        alone = np.array([one.predict([size]).times_s[0] for size in asked])
        assert alone == pytest.approx(batch.times_s, rel=1e-9)
        falls = [(2.0**a, 2.0**b) for a, b in one.falls()]
        assert len(falls) == (fall == 0.5 and one is found)
        down = asked[1:][np.diff(batch.times_s) < -1e-9 * batch.times_s[1:]]
        assert all(any(a <= size <= b * 1.04 for a, b in falls) for size in down)


@pytest.mark.parametrize("slow", [1, 2])
def test_before_a_fall_two_slow_rows_are_a_regime_and_one_is_a_spike(slow):
    """Asked just before the last slow row: as slow as that where the row before it is slow too."""
    sizes = 2.0 ** np.arange(10, 31, 2)
    top = int(np.flatnonzero(sizes == 1 << 20)[0])
    times = np.exp(PIPELINE.log_slopes(THETA, sizes)[0])
    times[top + 1 - slow : top + 1] *= 8.0
    told = fit(sizes, times, LAW).predict([2.0**19]).times_s[0]
    assert (told > 2.0 * times[top + 1]) == (slow == 2)


@pytest.mark.parametrize("before", [0.99, 1.01])
def test_a_spike_among_rows_of_one_time_is_a_spike_whatever_their_noise(before):
    sizes = 2.0 ** np.arange(10, 31, 2)
    top = int(np.flatnonzero(sizes == 1 << 20)[0])
    times = np.full(len(sizes), 1e-5)
    times[top - 1 : top + 1] *= before, 2.0
    assert fit(sizes, times, LAW).predict([2.0**19]).times_s[0] < 1.1e-5


def test_what_falls_without_a_row_is_predicted_by_its_lower_end():
    """A hump of another scale: no row of one's own tells how far it reaches."""
    times = np.exp(PIPELINE.log_slopes(THETA, SIZES)[0])
    hump = (SIZES >= 1 << 18) & (SIZES < 1 << 21)
    known = fit(SIZES, times * np.where(hump, 4.0, 1.0), replace(LAW, place=(3.0, np.nan)))
    moved = expect(transfer([known], replace(LAW, place=(3.0, np.nan)))).predict(SIZES)
    assert np.all(moved.times_s[hump] <= moved.times_s[SIZES == 1 << 21])
    assert moved.times_s[SIZES == 1 << 21] == pytest.approx(times[SIZES == 1 << 21], rel=0.2)


def test_rows_nearer_than_the_grid_may_fall():
    sizes = np.array([1000.0, 2000.0, 4000.0, 4001.0, 8000.0])
    told = fit(sizes, [3e-5, 6e-5, 9e-5, 4e-5, 6e-5], LAW).predict([4000.5])
    assert told.low_s[0] <= 4e-5
    assert told.high_s[0] >= 9e-5


def test_where_other_scales_mislead_the_tables_own_rows_count():
    """Their bumps are the same up to 1 MiB and opposite above: rows left out tell which of them to believe."""
    bumps = 0.4 * np.sin(np.log2(SIZES))
    times = np.exp(PIPELINE.log_slopes(THETA, SIZES)[0])
    theirs = fit(SIZES, times * np.exp(bumps), replace(LAW, place=(3.0, np.nan)))
    law = transfer([theirs], replace(LAW, place=(4.0, np.nan)))
    own = times * np.exp(np.where(SIZES < 1 << 20, bumps, -bumps))
    found = fit(SIZES[::2], own[::2], law)
    assert found.alone is not None
    asked, true = SIZES[1::2], own[1::2]
    off, off_beside, off_alone = (
        np.abs(np.log(one.predict(asked).times_s / true)) for one in (found, replace(found, alone=None), found.alone)
    )
    alike = asked < 1 << 20
    assert off[alike].mean() < off_alone[alike].mean()
    assert off[~alike].mean() < off_beside[~alike].mean()


def test_above_the_last_row_other_scales_count_as_much_as_at_it():
    """With named switches too, where what is beyond the rows is predicted without them."""
    times = np.exp(PIPELINE.log_slopes(THETA, SIZES)[0])
    bumps = 0.4 * np.sin(np.log2(SIZES))
    theirs = fit(SIZES, times * np.exp(bumps), replace(LAW, place=(3.0, np.nan)))
    law = replace(transfer([theirs], replace(LAW, place=(4.0, np.nan))), switches=(18.5,))
    small = SIZES <= 1 << 22
    found = fit(SIZES[small], (times * np.exp(-bumps) * np.where(SIZES > 2**18.5, 2.0, 1.0))[small], law)
    assert found.beyond is not None
    assert found.alone is not None
    asked = 2.0 ** np.array([22.0, 22.01])
    told, theirs_only = (one.predict(asked).times_s for one in (found.beyond, replace(found.beyond, alone=None)))
    assert np.abs(np.log(told / theirs_only)).min() > 0.03
    assert found.predict(asked[1:]).times_s == pytest.approx(told[1:], rel=1e-3)


def test_where_rows_are_on_their_law_alone_and_beside_others_there_is_nothing_to_weigh():
    theirs = fit(SIZES, np.exp(PIPELINE.log_slopes(THETA, SIZES)[0]), replace(LAW, place=(3.0, np.nan)))
    found = fit([1e6], [1e-4], transfer([theirs], replace(LAW, place=(4.0, np.nan))))
    assert found.alone is not None
    exact = replace(found, pull=np.zeros(1), alone=replace(found.alone, pull=np.zeros(1)))
    assert np.all(np.isfinite(exact.predict(SIZES).times_s))


def test_of_hardware_that_is_not_known_no_bump_is_carried_over():
    """How far apart two tables of it are is not known either: their bumps would come over whole, and as sure."""
    sizes, times = rows(made(THETA, SIZES, noise=0.1, seed=7))
    assert transfer([fit(sizes, times, vague(8))], vague(64)).beside is None
    assert transfer([fit(sizes, times, LAW)], replace(LAW, place=(3.0, LAW.place[1]))).beside is not None


def test_versions_are_apart_where_both_are_known():
    known, tables = Knowledge("dgx-h100"), made(THETA, SIZES)
    old, new, none = (known.law(replace(tables, library=each)) for each in ("NCCL 2.19.3", "NCCL 2.29.2", ""))
    assert old.apart(new) == pytest.approx(1.0)
    assert none.apart(new) == new.apart(none) == none.apart(none) == 0.0

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.errors import UsageError
from ringside.monitor import Detector, Verdict, detect
from ringside.monitor.slow_rank.detector import WINDOW
from ringside.monitor.slow_rank.noise import learn
from ringside.monitor.slow_rank.window_test import WindowTest
from ringside.monitor.stats import log_excess

Make = Callable[..., np.ndarray]


def few_or(many: int, *, few: int) -> pytest.MarkDecorator:
    """Give a test few seeds, jobs or steps (its `count`), and many where there is time for them."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.thorough)])


def autoregressive(steps: int, ranks: int, jitter: float, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, jitter * np.sqrt(1 - 0.81), (steps, ranks))
    for step in range(1, steps):
        noise[step] += 0.9 * noise[step - 1]
    return 0.1 * np.exp(noise)


@few_or(5, few=2)
def test_12_percent_of_128_ranks_within_ten_steps(make_own: Make, count: int) -> None:
    for seed in range(count):
        own = make_own(200, 128, seed=seed)
        own[120:, 77] *= 1.12
        (verdict,) = detect(own)
        assert (verdict.kind, verdict.ranks) == ("slow_rank", [77])
        assert verdict.detected_step < 130
        assert abs(verdict.since_step - 120) <= 2
        assert verdict.excess_ratio == pytest.approx(0.12, abs=0.015)


@few_or(9, few=3)
def test_30_percent_of_2_ranks_names_the_slow_one_only(make_own: Make, count: int) -> None:
    delays = []
    for seed in range(count):
        own = make_own(160, 2, jitter=0.05, seed=seed)
        own[60:, 1] *= 1.3
        (verdict,) = detect(own)
        assert verdict.ranks == [1]
        assert verdict.since_step == pytest.approx(60, abs=3)
        delays.append(verdict.detected_step - 60)
    assert np.median(delays) <= 20


@pytest.mark.parametrize("ranks", [2, 4, 8, 128])
def test_slow_from_the_first_step(make_own: Make, ranks: int) -> None:
    own = make_own(200, ranks)
    own[:, 1] *= 1.12
    (verdict,) = detect(own)
    assert verdict.ranks == [1]
    assert verdict.since_step == 0
    # There is no before that could be usual: all of its excess is priced.
    assert verdict.evidence["usual_excess_ratio"] == 0.0
    lost = own.max(axis=1) - np.delete(own, 1, axis=1).max(axis=1)
    assert verdict.cost_rank_seconds == pytest.approx(ranks * lost.sum(), rel=0.12)


@pytest.mark.parametrize("ranks", [2, 8, 128])
@pytest.mark.parametrize("jitter", [0.01, 0.1])
@few_or(1_500, few=250)
def test_healthy_noise_is_no_verdict(make_own: Make, ranks: int, jitter: float, count: int) -> None:
    assert detect(make_own(count, ranks, jitter=jitter)) == []


@few_or(1_500, few=400)
def test_healthy_spikes_and_constant_differences_are_no_verdict(make_own: Make, count: int) -> None:
    rng = np.random.default_rng(5)
    own = make_own(count, 8) * rng.uniform(0.97, 1.03, (1, 8))
    own *= np.where(rng.random(own.shape) < 0.01, rng.uniform(1.2, 5, own.shape), 1)
    assert detect(own) == []


@few_or(3_000, few=600)
def test_healthy_autocorrelated_noise_is_no_verdict(count: int) -> None:
    assert detect(autoregressive(count, 8, 0.02, seed=2)) == []


@few_or(9, few=3)
def test_a_culprit_in_autocorrelated_noise_is_found_within_30_steps(count: int) -> None:
    delays = []
    for seed in range(count):
        own = autoregressive(300, 128, 0.02, seed)
        own[150:, 3] *= 1.12
        verdicts = [verdict for verdict in detect(own) if verdict.ranks == [3]]
        assert verdicts
        delays.append(verdicts[0].detected_step - 150)
    assert np.median(delays) <= 30


def test_one_long_pause_is_no_slow_rank(make_own: Make) -> None:
    own = make_own(200, 2)
    own[80, 1] += 3.0
    assert detect(own) == []


@few_or(1_000, few=300)
def test_pauses_now_and_then_are_no_slow_rank(make_own: Make, count: int) -> None:
    own = make_own(count, 4)
    own[30::50, 2] *= 2.0
    assert detect(own) == []


@pytest.mark.parametrize(("late", "named"), [([0, 1, 3, 5, 7, 8, 10], []), ([0, 1, 3, 4, 6, 7, 9, 10], [[1]])])
def test_of_twelve_steps_two_in_three_must_be_late_however_late_they_are(
    make_own: Make, late: list[int], named: list[list[int]]
) -> None:
    """Seven late steps lift the mean of twelve as far as a slow rank does; they are a burst."""
    own = make_own(150, 64, jitter=0.005)
    own[100 + np.array(late), 1] *= 1.3
    assert [verdict.ranks for verdict in detect(own)] == named


def test_wild_first_steps_are_no_verdict(make_own: Make) -> None:
    own = make_own(200, 2)
    own[:4, 0] *= [30.0, 8.0, 3.0, 1.5]
    assert detect(own) == []


def test_two_culprits_are_two_verdicts(make_own: Make) -> None:
    own = make_own(200, 8)
    own[100:, [2, 5]] *= 1.2
    assert sorted(verdict.ranks[0] for verdict in detect(own)) == [2, 5]


def test_an_episode_ends_and_another_may_begin(make_own: Make) -> None:
    own = make_own(500, 4)
    own[100:200, 3] *= 1.2
    own[350:, 3] *= 1.3
    first, second = detect(own)
    assert first.evidence["until_step"] == pytest.approx(200, abs=3)
    assert first.excess_ratio == pytest.approx(0.2, abs=0.02)
    assert second.since_step == pytest.approx(350, abs=2)
    assert second.detected_step <= 362
    assert "until_step" not in second.evidence


def test_a_culprit_that_moves_is_named_on_both_ranks(make_own: Make) -> None:
    own = make_own(400, 2)
    own[100:200, 0] *= 1.3
    own[200:, 1] *= 1.3
    first, second = detect(own)
    assert (first.ranks, second.ranks) == ([0], [1])
    assert second.since_step == pytest.approx(200, abs=3)


@few_or(2_000, few=700)
def test_below_the_effect_gate_nothing_is_reported(make_own: Make, count: int) -> None:
    own = make_own(count, 8, jitter=0.01)
    own[300:, 3] *= 1.03
    assert detect(own) == []


def test_a_slow_drift_is_found_in_the_end(make_own: Make) -> None:
    own = make_own(900, 8)
    own[100:, 6] *= 1 + 0.15 * np.minimum(np.arange(800) / 500, 1)
    (verdict,) = detect(own)
    assert verdict.ranks == [6]


def test_a_drift_does_not_teach_that_such_noise_is_usual() -> None:
    """Of many ranks in autocorrelated noise one becomes 30% slower within 400 steps, which looks like more of it."""
    rng = np.random.default_rng(0)
    state = rng.normal(0, 0.02, (6, 64))
    screens, seen = [WindowTest(1, 64) for _ in range(6)], [1_000] * 6
    for step in range(300):
        state = 0.9 * state + rng.normal(0, 0.02 * np.sqrt(1 - 0.81), state.shape)
        own = np.exp(state)
        own[:, 1] *= 1 + 0.3 * np.clip((step - 60) / 400, 0, 1)
        for job, screen in enumerate(screens):
            opened, _ = screen.update(log_excess(own[job : job + 1]))
            seen[job] = min(seen[job], step) if opened[0, 1] else seen[job]
    assert max(seen) < 300


def test_more_samples_explain_more_time(make_own: Make) -> None:
    samples = np.full((200, 4), 32.0)
    samples[100:, 2] = 40
    own = make_own(200, 4) * samples / 32
    (with_samples,) = detect(own, samples)
    (without,) = detect(own)
    assert with_samples.kind == "uneven_work"
    assert with_samples.evidence["more_samples_ratio"] == pytest.approx(0.25)
    assert without.kind == "slow_rank"


def test_more_samples_do_not_excuse_a_slow_rank(make_own: Make) -> None:
    samples = np.full((200, 4), 100.0)
    samples[100:, 2] = 105
    own = make_own(200, 4)
    own[100:, 2] *= 1.4
    (verdict,) = detect(own, samples)
    assert verdict.kind == "slow_rank"


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), ranks=st.integers(1, 5), share=st.floats(0, 1))
def test_bad_values_never_crash_it(seed: int, ranks: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    bad = rng.choice([0.0, -1.0, np.nan, np.inf, -np.inf, 1e-300, 1e300], (40, ranks))
    own = np.where(rng.random((40, ranks)) < share, bad, 0.1)
    for verdict in detect(own, rng.choice([0.0, np.nan, 8.0], (40, ranks))):
        assert np.isfinite(verdict.excess_ratio)


def test_gaps_do_not_hide_a_culprit(make_own: Make) -> None:
    own = make_own(300, 4)
    own[100:, 1] *= 1.2
    own[np.random.default_rng(1).random(own.shape) < 0.2] = np.nan
    (verdict,) = detect(own)
    assert verdict.ranks == [1]


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [1, 2, 3, 4, 0], [2, 0, 1, 4, 3]])
def test_it_does_not_matter_what_the_ranks_are_called(make_own: Make, order: list[int]) -> None:
    own = make_own(100, 5)
    own[60:, 2] *= 1.25
    (one,), (other,) = detect(own), detect(own[:, order])
    assert order[other.ranks[0]] == one.ranks[0] == 2
    assert (one.since_step, one.detected_step) == (other.since_step, other.detected_step)


@pytest.mark.parametrize("scale", [1e-5, 1e6])
def test_the_unit_of_time_changes_only_seconds(make_own: Make, scale: float) -> None:
    own = make_own(140, 3)
    own[90:, 2] *= 1.3
    (one,), (other,) = detect(own), detect(own * scale)
    assert (other.ranks, other.since_step, other.detected_step) == (one.ranks, one.since_step, one.detected_step)
    assert other.cost_rank_seconds == pytest.approx(scale * one.cost_rank_seconds, rel=1e-6)


def judged_slowly(own: np.ndarray, verdict: Verdict, begin: int, end: int) -> dict[str, float]:
    """What docs/verdicts.md says that a verdict says of the steps begin <= step < end, a number at a time."""
    (rank,) = verdict.ranks
    mine: list[float] = []
    theirs: list[float] = []
    excess: list[float] = []
    rows: list[tuple[float, list[float]]] = []
    for step in range(begin, end):
        t = float(own[step, rank])
        others = [float(other) for r, other in enumerate(own[step]) if r != rank and not math.isnan(other)]
        mine += [] if math.isnan(t) else [t]
        theirs += others
        excess += [] if math.isnan(t) or not others else [math.log(t / median(others))]
        rows.append((t, others))
    usual = math.log1p(float(verdict.evidence["usual_excess_ratio"]))
    lost, blocks = 0.0, max(len(rows) // 96, 1)
    for block in range(blocks):  # the price: each 96 steps are repaired by one factor, the last with what remains
        some = rows[96 * block : 96 * (block + 1) if block + 1 < blocks else None]
        above = median(math.log(t / median(others)) for t, others in some if not math.isnan(t) and others)
        for t, others in some:
            if not math.isnan(t):
                repaired = t * math.exp(-max(above - usual, 0.0))
                lost += max([t, *others]) - max([repaired, *others])
    return {
        "excess_ratio": math.expm1(median(excess)),
        "own_seconds": median(mine),
        "others_own_seconds": median(theirs),
        "steps": end - begin,
        "cost_rank_seconds": own.shape[1] * lost,
    }


def told(verdict: Verdict) -> dict[str, float]:
    """The same numbers as a verdict has them."""
    evidence = {name: float(verdict.evidence[name]) for name in ("own_seconds", "others_own_seconds", "steps")}
    return {**evidence, "excess_ratio": verdict.excess_ratio, "cost_rank_seconds": verdict.cost_rank_seconds}


def agrees(verdict: Verdict, own: np.ndarray, begin: int, end: int) -> bool:
    return told(verdict) == pytest.approx(judged_slowly(own, verdict, begin, end), rel=1e-9)


def test_an_episode_is_judged_on_its_steps_so_far_and_in_the_end_on_all_of_them(make_own: Make) -> None:
    own = make_own(340, 4)
    own[60:300, 3] *= 1.3
    own[np.random.default_rng(1).random(own.shape) < 0.05] = np.nan
    detector = Detector(4)
    begun, ended = (finding.verdict for row in own for finding in detector.update(row))
    assert agrees(begun, own, begun.since_step, begun.detected_step + 1)
    assert ended.evidence["until_step"] == pytest.approx(300, abs=3)
    assert detector.open == []
    (whole,) = detect(own)
    assert (whole.ranks, whole.since_step, whole.detected_step) == ([3], begun.since_step, begun.detected_step)
    assert whole.evidence["until_step"] == ended.evidence["until_step"]
    assert agrees(whole, own, whole.since_step, int(whole.evidence["until_step"]))


def test_an_episode_that_is_noticed_late_is_judged_on_the_steps_that_are_remembered(make_own: Make) -> None:
    own = make_own(400, 8, jitter=0.17, seed=1)
    own[60:, 3] *= 1.1
    detector = Detector(8)
    (begun,) = (finding.verdict for row in own for finding in detector.update(row))
    assert (begun.ranks, begun.since_step) == ([3], 61)
    assert begun.detected_step - begun.since_step > WINDOW
    assert agrees(begun, own, begun.detected_step + 1 - WINDOW, begun.detected_step + 1)
    (whole,) = detect(own)
    assert agrees(whole, own, whole.since_step, len(own))


def test_on_line_step_numbers_are_the_callers(make_own: Make) -> None:
    own = make_own(200, 4)
    own[100:, 3] *= 1.2
    detector = Detector(4)
    found = [finding for step, row in enumerate(own) for finding in detector.update(row, step=5_000 + 2 * step)]
    assert found[0].verdict.since_step == pytest.approx(5_200, abs=4)


def test_memory_does_not_grow_with_steps(make_own: Make) -> None:
    import pickle

    detector = Detector(4)
    own = make_own(800, 4)
    for row in own[:400]:
        detector.update(row)
    early = len(pickle.dumps(detector))
    for row in own[400:]:
        detector.update(row)
    assert len(pickle.dumps(detector)) <= early + 64


@pytest.mark.parametrize("shape", [(0, 3), (50, 1), (50, 0)])
def test_nothing_to_compare_is_no_verdict(shape: tuple[int, int]) -> None:
    assert detect(np.ones(shape)) == []


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[steps, ranks\]"):
        detect(np.ones(5))
    with pytest.raises(UsageError, match="both are"):
        detect(np.ones((5, 2)), np.ones((5, 3)))
    with pytest.raises(UsageError, match="4 ranks"):
        Detector(4).update([1.0, 2.0])
    with pytest.raises(UsageError, match="at least one rank"):
        Detector(0)


@pytest.mark.parametrize(("ranks", "onset", "within"), [(8, 10, 12), (4, 16, 12), (2, 40, 30), (2, 10, 150)])
@few_or(10, few=2)
def test_a_rank_that_becomes_slow_early_is_found_too(
    make_own: Make, ranks: int, onset: int, within: int, count: int
) -> None:
    """The first steps, from which noise is learnt, may hold the onset; it must not pass for noise for good."""
    found = 0
    for seed in range(count):
        own = make_own(onset + 190, ranks, seed=seed)
        own[onset:, 1] *= 1.5
        verdicts = detect(own)
        assert all(verdict.ranks == [1] for verdict in verdicts)
        found += bool(verdicts) and verdicts[0].detected_step <= onset + within
    assert found >= 0.8 * count


@few_or(100, few=10)
def test_two_ranks_that_wander_are_no_verdict(count: int) -> None:
    """10% jitter of autocorrelation 0.9: as far apart as a slow rank would be, and for dozens of steps."""
    rng = np.random.default_rng(3)
    screens, opened = [WindowTest(1, 2) for _ in range(count)], 0
    state = rng.normal(0, 0.1, (count, 2))
    for _ in range(300):
        state = 0.9 * state + rng.normal(0, 0.1 * np.sqrt(1 - 0.81), state.shape)
        excess = log_excess(np.exp(state))
        opened += sum(int(screen.update(row[None])[0].sum()) for screen, row in zip(screens, excess, strict=True))
    assert opened <= 0.04 * count  # of 1,000 jobs 24; it was one in five


def test_a_moving_culprit_leaves_no_verdict_behind(make_own: Make) -> None:
    own = make_own(720, 8)
    for turn in range(6):
        own[100 + 100 * turn : 200 + 100 * turn, turn] *= 1.2
    verdicts = detect(own)
    assert [verdict.ranks for verdict in verdicts] == [[turn] for turn in range(6)]
    for turn, verdict in enumerate(verdicts):
        assert verdict.since_step == pytest.approx(100 + 100 * turn, abs=3)
        assert verdict.evidence["until_step"] == pytest.approx(200 + 100 * turn, abs=3)


def test_a_culprit_in_a_constant_spread_is_named(make_own: Make) -> None:
    spread = np.random.default_rng(7).uniform(0.97, 1.03, 128)
    own = make_own(300, 128) * spread
    assert detect(own) == []
    own[150:, 40] *= 1.12
    (verdict,) = detect(own)
    assert verdict.ranks == [40]
    assert verdict.detected_step <= 180


@pytest.mark.parametrize("ranks", [4, 8])
def test_two_culprits_of_few(make_own: Make, ranks: int) -> None:
    own = make_own(250, ranks)
    own[150:, [0, ranks - 1]] *= 1.12
    verdicts = detect(own)
    assert sorted(verdict.ranks[0] for verdict in verdicts) == [0, ranks - 1]
    assert max(verdict.detected_step for verdict in verdicts) <= 180


def test_a_rank_that_never_reports_changes_nothing_for_the_others(make_own: Make) -> None:
    own = make_own(220, 5)
    own[120:, 3] *= 1.2
    own[:, 1] = np.nan
    (verdict,) = detect(own)
    assert verdict.ranks == [3]
    assert detect(np.full((50, 4), np.nan)) == []
    assert detect(own[:1]) == []


def test_what_a_rank_exceeded_the_others_by_before_is_no_part_of_its_price(make_own: Make) -> None:
    own = make_own(260, 4, jitter=0.003)
    own[:, 1] *= 1.04
    own[120:, 1] *= 1.3
    (verdict,) = detect(own)
    assert verdict.evidence["usual_excess_ratio"] == pytest.approx(0.04, abs=0.01)
    assert verdict.cost_rank_seconds == pytest.approx(4 * 140 * 0.1 * (1.04 * 1.3 - 1.04), rel=0.05)


def test_one_known_step_tells_nothing_of_how_steps_vary() -> None:
    bars = []
    for known in range(3):
        excess = np.full((8, 1, 4), math.nan)
        excess[:known] = 0.0
        bars.append(learn(excess, np.array([5, 12, 40]), 5.0).bars.min())
    assert bars[0] == bars[1] > 1e5, "a bar that nobody reaches"
    assert bars[2] < 1

"""Where no verdict is, how sure that makes us: the promise to find a straggler is held against the detector."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from ringside.monitor import RunInfo, StepRecord, detect
from ringside.monitor.assessment import (
    LIKELY,
    PROMISED,
    UNLIKELY,
    Assessment,
    assess,
    assess_stragglers,
    describe_assessment,
    would_be_found,
)
from ringside.monitor.run.table import tabulate
from ringside.monitor.slow_rank.detector import Detector
from ringside.monitor.summary import summarise
from ringside.monitor.undecided import TOO_LITTLE, Suspect, Undecided

pytestmark = pytest.mark.core
Records = Callable[..., list[StepRecord]]
Info = Callable[..., RunInfo]


def noisy(kind: str, steps: int, ranks: int, spread: float, seed: int) -> np.ndarray:
    """Own times of healthy ranks, float64 [steps, ranks], seconds."""
    random = np.random.default_rng(seed)
    noise = random.normal(0.0, spread, (steps, ranks))
    if kind == "pauses":
        noise += (random.random((steps, ranks)) < 0.03) * 4 * spread
    if kind == "wandering":
        for row in range(1, steps):
            noise[row] = 0.6 * noise[row - 1] + 0.8 * noise[row]
    return 0.1 * np.exp(noise)


def watched(own: np.ndarray) -> Undecided:
    """What is undecided after a run, as it is watched."""
    detector = Detector(own.shape[1], has_parts=True)
    for row in own:
        detector.update(row)
    return detector.undecided()


@pytest.mark.parametrize("kind", ["even", "pauses", "wandering"])
def test_where_it_is_promised_the_detector_finds_a_straggler_of_ten_per_cent(kind: str) -> None:
    promised, found = 0, 0
    for seed, spread in enumerate(0.005 * 1.8 ** np.arange(6)):
        ranks, steps = (2, 4, 8)[seed % 3], (120, 160)[seed % 2]
        own = noisy(kind, steps, ranks, spread, seed)
        if would_be_found(watched(own)):
            promised += 1
            own[steps // 2 :, seed % ranks] *= 1.0 + PROMISED
            found += any(verdict.ranks == [seed % ranks] for verdict in detect(own))
    assert found == promised >= 2
    assert promised < 6  # and it is not promised in any noise


def test_little_is_promised_of_few_steps_and_of_ranks_of_which_little_is_known() -> None:
    own = noisy("even", 200, 4, 0.01, 0)
    assert would_be_found(watched(own))
    assert not would_be_found(watched(own), 0.08)
    assert not would_be_found(watched(own[:8]))
    own[:, 1] = np.nan
    assert not would_be_found(watched(own))


def test_a_slow_rank_without_a_verdict_is_named_with_since_when_and_where(
    make_records: Records, make_info: Info
) -> None:
    random = np.random.default_rng(3)
    data = np.full((90, 2), 0.0003)
    data[40:, 1] = 0.03 * np.exp(random.normal(0.0, 0.9, 50))
    own = 0.088 * np.exp(random.normal(0.0, 0.12, (90, 2))) + data
    records = [msgspec.structs.replace(r, data_seconds=float(data[r.step, r.rank])) for r in make_records(own)]
    suspect = Suspect(rank=1, since_step=42, excess_ratio=0.36, bar_ratio=0.9, healthy_steps=LIKELY)
    found = assess_stragglers(tabulate(records, 2), [], Undecided(step=89, suspects=[suspect], found={24: 0.4}))
    assert (found.state, found.rank, found.phase, found.found_ratio) == ("undecided", 1, "data", None)
    assert (found.since_step, found.excess_ratio) == (42, 0.36)
    words = describe_assessment(found)
    assert words.startswith("Rank 1 was slowest: +")
    assert words.endswith(
        f"since about step {found.since_step}, nearly all in data loading, but too unsteady to be sure."
    )
    assert summarise(make_info(2), records, [])["assessment"]["state"] == "undecided"


def test_a_verdict_is_no_question_any_more_and_one_rank_waits_for_nobody(make_records: Records) -> None:
    own = noisy("even", 200, 2, 0.01, 0)
    own[100:, 1] *= 1.3
    undecided = watched(own)
    assert assess_stragglers(tabulate(make_records(own), 2), detect(own), undecided) == Assessment(state="straggler")
    assert assess_stragglers(tabulate(make_records(own[:50, :1]), 1), [], Undecided(step=49)).state == "none"


def test_what_chance_gives_and_what_holds_nobody_up_is_no_question() -> None:
    suspect = Suspect(rank=1, since_step=42, excess_ratio=0.36, bar_ratio=0.9, healthy_steps=LIKELY)
    small, chance = (msgspec.structs.replace(suspect, **{name: value}) for name, value in
                     (("excess_ratio", PROMISED / 2), ("healthy_steps", LIKELY // 2)))  # fmt: skip
    minor = msgspec.structs.replace(suspect, healthy_steps=0, why=TOO_LITTLE)
    for other in (small, chance, minor):
        assert assess(Undecided(step=60, suspects=[other], found={24: 0.05})).state == "none"
        assert assess(Undecided(step=60, suspects=[other, suspect], found={24: 0.05})).rank == 1
    assert assess(Undecided(step=60, suspects=[chance], found={24: 0.4})).rank == 1, "where nothing is promised"
    rash = msgspec.structs.replace(suspect, healthy_steps=UNLIKELY - 1)
    assert assess(Undecided(step=60, suspects=[rash], found={24: 0.4})).rank is None
    assert assess(Undecided(step=60, suspects=[small, minor], found={24: 0.4})).rank is None


def test_who_is_slow_in_too_unsteady_steps_is_named_in_the_end() -> None:
    named = []
    for seed in range(12):
        own = noisy("wandering", 110, 2, 0.4, seed)
        own[30:, 1] *= 2.0
        named += [] if detect(own) else [assess(watched(own)).rank]
    assert len(named) >= 4
    assert set(named) <= {1, None}
    assert named.count(1) >= len(named) / 2


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_chance_names_nobody(ranks: int) -> None:
    named = 0
    for seed in range(20):
        named += assess(watched(noisy("even", 150, ranks, 0.3, seed))).rank is not None
    assert named <= 2


def test_what_is_promised_is_said() -> None:
    steady = assess(watched(noisy("even", 200, 4, 0.01, 0)))
    assert steady == Assessment(state="none", found_ratio=PROMISED)
    assert describe_assessment(steady).endswith("slower would have been found.")
    unsteady = assess(watched(noisy("even", 200, 4, 0.4, 0)))
    assert (unsteady.state, unsteady.rank) == ("undecided", None)
    assert "might not have been found" in describe_assessment(unsteady)
    assert math.isclose(PROMISED, 0.1)


def test_own_times_that_may_be_waits_show_nothing(make_info: Info) -> None:
    """All ranks seem to work all the time where their waits are not seen."""
    records = [
        StepRecord(step=step, rank=rank, ended_unix=0.0, step_seconds=0.1, own_seconds=0.1)
        for step in range(200)
        for rank in range(2)
    ]
    assert summarise(make_info(2), records, [])["assessment"]["state"] == "none"
    hidden = [msgspec.structs.replace(record, unclear_seconds=0.02) for record in records]
    assert summarise(make_info(2), hidden, [])["assessment"]["state"] == "undecided"

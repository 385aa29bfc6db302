"""What may look like a slow rank and is none, and twenty jobs of each: no rank is called slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ringside.monitor.collector import standard_watchers
from ringside.monitor.groups import JobGroups
from ringside.monitor.run.records import Group, Row
from ringside.monitor.verdict import Verdict

from .jobs import opened
from .simulated import Ranks, gpipe

STEPS, ONSET = 140, 60
ALL = [0, 1, 2, 3]
DATA = [Group(name=f"dp{stage}", description="mesh_dp", ranks=(stage, stage + 2)) for stage in (0, 1)]
STAGES = [Group(name=f"pp{at}", description="mesh_pp", ranks=(at, at + 1), has_messages=True) for at in (0, 2)]
ALONE = [Group(name="pp", description="mesh_pp", ranks=(0, 1, 2, 3), has_messages=True)]


def prefetched(seed: int) -> Iterator[Row]:
    """FSDP's all-gathers: issued a layer ahead, earlier by one rank than by the others, and needed late."""
    ranks = Ranks(4, seed)
    for _ in range(STEPS):
        for _ in range(4):
            issued = ranks.now.copy()
            ranks.compute(np.array([0.002, 0.001, 0.001, 0.001]))
            issued[1:] = ranks.now[1:]
            ranks.compute(np.array([0.023, 0.024, 0.024, 0.024]))
            ranks.wait("fsdp", ALL, issued, 0.004)
        yield ranks.step_ends()


def slow_link(seed: int) -> Iterator[Row]:
    """Whatever goes to one rank arrives late from a step on, though everybody had sent in time."""
    ranks = Ranks(4, seed)
    for step in range(STEPS):
        for _ in range(4):
            ranks.compute(0.025)
            ranks.wait("dp", ALL, ranks.now.copy(), np.array([0.001, 0.001, 0.021 if step > ONSET else 0.001, 0.001]))
        yield ranks.step_ends()


def heavier_stage(seed: int) -> Iterator[Row]:
    """The second stage has half as much again to compute, in both replicas."""
    ranks = Ranks(4, seed)
    for _ in range(STEPS):
        gpipe(ranks, [(0, 1), (2, 3)], np.array([0.01, 0.015, 0.01, 0.015]), 4)
        for stage in (0, 1):
            ranks.wait(f"dp{stage}", [stage, stage + 2], ranks.now.copy())
        yield ranks.step_ends()


def without_replicas(seed: int) -> Iterator[Row]:
    """A pipeline alone, one rank of which needs a third longer from a step on."""
    ranks = Ranks(4, seed)
    for step in range(STEPS):
        gpipe(ranks, [(0, 1, 2, 3)], np.array([0.01, 0.0133 if step > ONSET else 0.01, 0.01, 0.01]), 4)
        yield ranks.step_ends()


def jumping_clock(seed: int) -> Iterator[Row]:
    """A host's wall clock jumps ahead by an hour, and later back by two."""
    ranks = Ranks(4, seed)
    for step in range(STEPS):
        ranks.compute(0.1)
        ranks.wait("dp", ALL, ranks.now.copy())
        jump = 3600.0 * (step > ONSET) - 7200.0 * (step > 2 * ONSET)
        yield ranks.step_ends(np.array([0.0, 0.0, jump, jump]))


def checkpoint(seed: int) -> Iterator[Row]:
    """Rank 0 alone writes for several steps' time, twice."""
    ranks = Ranks(4, seed)
    for step in range(STEPS):
        ranks.compute(0.1)
        if step in (ONSET, 2 * ONSET):
            ranks.compute(0.5, [0])
        ranks.wait("dp", ALL, ranks.now.copy())
        yield ranks.step_ends()


def found(job: Iterator[Row], groups: list[Group]) -> list[Verdict]:
    known = JobGroups(4)
    known.learn(groups)
    watchers = standard_watchers(4, groups=known)
    return opened(event for step, row in enumerate(job) for one in watchers for event in one.update(step, row))


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 20), marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize(
    ("play", "groups", "kinds"),
    [
        pytest.param(prefetched, [], set(), id="prefetched"),
        pytest.param(slow_link, [], set(), id="slow link"),
        pytest.param(heavier_stage, [*DATA, *STAGES], {"stage_imbalance"}, id="heavier stage"),
        pytest.param(without_replicas, ALONE, {"changed"}, id="no replicas"),
        pytest.param(jumping_clock, [], set(), id="jumping clock"),
        pytest.param(checkpoint, [], set(), id="checkpoint"),
    ],
)
def test_no_rank_is_called_slow(
    play: Callable[[int], Iterator[Row]], groups: list[Group], kinds: set[str], seeds: range
) -> None:
    said = [found(play(seed), groups) for seed in seeds]
    assert {verdict.kind for verdicts in said for verdict in verdicts} == kinds
    if kinds == {"changed"}:
        assert {tuple(verdict.ranks) for verdicts in said for verdict in verdicts} == {(1,)}


def experts(seed: int, slow: float = 1.0) -> Iterator[Row]:
    """More tokens are sent to one rank's experts from a step on, or its device is slower."""
    ranks, tokens = Ranks(4, seed), np.full(4, 1000)
    for step in range(STEPS):
        late = step > ONSET
        received = tokens * np.array([1.0, 1.0, 1.4 if late and slow == 1.0 else 1.0, 1.0])
        for bytes_in_all_to_all in (received, np.maximum(received, tokens)):  # there and back, as `WaitMeter` counts
            ranks.routed += bytes_in_all_to_all.astype(int)
        ranks.compute(0.05 * received / 1000 * np.array([1.0, 1.0, slow if late else 1.0, 1.0]))
        ranks.wait("ep", ALL, ranks.now.copy())
        ranks.compute(0.02)
        ranks.wait("ep", ALL, ranks.now.copy())
        yield ranks.step_ends()


@pytest.mark.parametrize(("slow", "kind"), [(1.0, "uneven_work"), (1.4, "slow_rank")])
def test_a_rank_with_more_tokens_is_given_more_work_and_is_not_slow(slow: float, kind: str) -> None:
    for seed in range(2):
        (verdict,) = found(experts(seed, slow), [])
        assert (verdict.kind, verdict.ranks) == (kind, [2])
        assert verdict.evidence["more_routed_ratio"] == pytest.approx(0.4 if slow == 1.0 else 0.0, abs=0.01)

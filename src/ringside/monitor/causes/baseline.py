"""A slow rank beside the healthy ones and beside its own past: what share of its own time it spent how.

What holds a rank up is a share of its own time that is larger than before and larger than at every healthy rank, by
enough to account for a good part of the excess and by more than it varies.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.run.table import StepTable
from ringside.monitor.run.vitals_table import VitalsTable
from ringside.monitor.slow_rank.window_test import WARM_UP
from ringside.monitor.stats import Floats, known_median, log_excess

EXPLAINS = 0.4
"""A sign is a cause if it accounts for this share of the time lost."""
LEAST = 0.03
"""A smaller share of the time than this is no cause of anything."""
NOISE = 3.0
"""It must exceed what it varies by so many times (the standard error of its mean)."""
HEALTHY = 0.5
"""Ranks with less than this share of the culprit's excess are healthy."""


class Measurement(NamedTuple):
    """One sign at a rank.

    Args:
        now: Its share during the episode.
        usual: Its share before; NaN: not known.
        others: The largest share of a healthy rank during the episode; NaN: not known.
        noise: The standard error of `now`.
    """

    now: float
    usual: float
    others: float
    noise: float

    @property
    def more(self) -> float:
        """How much larger it is than in the past and elsewhere; 0 where it is not, or there is nothing to compare."""
        known = [value for value in (self.usual, self.others) if np.isfinite(value)]
        return max(self.now - max(known), 0.0) if known and np.isfinite(self.now) else 0.0

    @property
    def saved(self) -> float:
        """The share of the rank's own time that it would save if this were as elsewhere and in its past.

        It would do the same work, which takes 1 - now of its time, and that would then be 1 - now + more of it.
        """
        return self.more / max(1.0 - self.now + self.more, LEAST)

    def explains(self, lost: float) -> bool:
        """Whether it is a cause of a rank's losing that share of its own time."""
        return self.more >= max(LEAST, NOISE * self.noise) and self.saved >= EXPLAINS * lost


class RankComparison(NamedTuple):
    """A slow rank and whom to compare it with.

    Args:
        rank: The culprit.
        lost: The share of its own time that it lost.
        healthy: Which ranks are not slow, bool [ranks].
        episode: The vitals since it became slow.
        past: Those before.
        own_seconds: Own time of each rank per step, [ranks].
        synced: Share of the time each rank is blocked in synchronisation, [ranks], during the episode ...
        synced_before: ... and before.
    """

    rank: int
    lost: float
    healthy: NDArray[np.bool_]
    episode: VitalsTable
    past: VitalsTable
    own_seconds: Floats
    synced: Floats
    synced_before: Floats

    def read(self, share: Callable[[VitalsTable, Floats], Floats]) -> Measurement:
        """Return a sign's reading.

        Args:
            share: From vitals, and the share of the time each rank is blocked in synchronisation, to float64 [rows].
        """
        now, before = share(self.episode, self.synced), share(self.past, self.synced_before)
        means, mine = self.episode.mean(now), self.episode.owners == self.rank
        earlier = before[(self.past.owners == self.rank) & np.isfinite(before)]
        others = means[self.healthy & np.isfinite(means)]
        spread = np.concatenate([_residuals(self.episode, now), _residuals(self.past, before)])
        rows = max(int(np.isfinite(now[mine]).sum()), 1)
        return Measurement(
            now=float(means[self.rank]),
            usual=float(np.median(earlier)) if earlier.size else math.nan,  # it may have been slow before
            others=float(others.max()) if others.size else math.nan,
            noise=math.sqrt(float(np.mean(spread**2)) / rows) if spread.size else 0.0,
        )

    def level(self, field: str) -> float:
        """Return the mean of a field at the culprit during the episode; NaN: not known."""
        return float(self.episode.mean(self.episode[field])[self.rank])

    def others(self, field: str) -> float:
        """Return the median of a field's means at the healthy ranks during the episode; 0: not known."""
        return known_median(self.episode.mean(self.episode[field])[self.healthy])


def compare_rank(rank: int, excess_ratio: float, episode: StepTable, before: StepTable | None) -> RankComparison:
    """Return whom to compare a slow rank with.

    Args:
        rank: The culprit.
        excess_ratio: How much longer its own time is than the others'.
        episode: The records since it became slow.
        before: The records before, where there are any.
    """
    excess = log_excess(episode["own_seconds"])
    typical = np.array([known_median(excess[:, other]) for other in range(episode.ranks)])
    healthy = typical < HEALTHY * np.log1p(max(excess_ratio, 0.0))
    healthy[rank] = False
    earlier = before if before is not None else episode.before(0)
    return RankComparison(
        rank=rank,
        lost=excess_ratio / (1.0 + excess_ratio),
        healthy=healthy,
        episode=episode.vitals,
        past=earlier.vitals.between(WARM_UP),
        own_seconds=np.array([known_median(episode["own_seconds"][:, other]) for other in range(episode.ranks)]),
        synced=_synced(episode),
        synced_before=_synced(earlier),
    )


def _residuals(vitals: VitalsTable, values: Floats) -> Floats:
    """Return the known rows' deviations from the mean of their rank."""
    deviations: Floats = values - vitals.mean(values)[vitals.owners]
    return deviations[np.isfinite(deviations)]


def _synced(table: StepTable) -> Floats:
    steps = np.nansum(table["step_seconds"], axis=0)
    share: Floats = np.where(steps > 0, np.nansum(table["exposed_seconds"], axis=0) / np.where(steps > 0, steps, 1), 0)
    return np.clip(share, 0.0, 1.0)

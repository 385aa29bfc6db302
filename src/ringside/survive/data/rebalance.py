"""What to do about a rank that takes longer: tell, give it fewer micro-batches, or go on without it.

The leader collects everybody's own time per micro-batch, committed step by committed step. Medians over a window
decide, so one stall moves nothing. What a change of quotas is to gain is said before, and measured after it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ringside.errors import UsageError
from ringside.survive.protocol.events import DrainWanted, QuotasWanted
from ringside.survive.protocol.settings import GAIN_WORTH, balanced_quotas, step_seconds

Mode = Literal["alert", "rebalance", "drain"]
MODES: tuple[Mode, ...] = ("alert", "rebalance", "drain")
WINDOW = 12
"""Committed steps that are looked at together."""
HOPELESS = 3.0
"""A rank that takes so many times as long as the median of the others is drained, where that was asked for."""

SHORTEST_S = 0.005
"""Of steps whose computation is shorter nothing is said: what makes their ranks differ is the machine."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rebalance:
    """A change of quotas.

    Args:
        ranks: The members.
        before: Their quotas until then.
        after: Their quotas since.
        predicted: By which share the longest computation was to become shorter.
        seconds_before: The longest computation of a step before, median, seconds.
    """

    ranks: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    predicted: float
    seconds_before: float


@dataclass
class Stragglers:
    """Watches own times on the leader.

    Args:
        mode: What to do: `alert`, `rebalance` or `drain`.

    Attributes:
        done: Changes of quotas, each with the gain that was measured; None: not yet.
    """

    mode: Mode
    done: list[tuple[Rebalance, float | None]] = field(default_factory=list)
    _rows: deque[dict[int, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _generation: int = 0
    _reported: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"on_straggler={self.mode!r}: there are {', '.join(MODES)}")

    def add(
        self, generation: int, quotas: Mapping[int, int], seconds: Mapping[int, float]
    ) -> QuotasWanted | DrainWanted | None:
        """Take in a committed step; return what is wanted, if anything.

        Args:
            generation: In which generation it was.
            quotas: Micro-batches of every member.
            seconds: Own time per micro-batch of every member that computed any, seconds.
        """
        if generation != self._generation:
            self._generation = generation
            self._rows.clear()
        if set(seconds) != set(quotas) or not all(s > 0 for s in seconds.values()):
            return None  # a member without micro-batches cannot be timed
        self._rows.append(dict(seconds))
        if len(self._rows) < WINDOW:
            return None
        medians = {rank: median(row[rank] for row in self._rows) for rank in sorted(quotas)}
        self._measure_gain(quotas)

        # A rank that is hopelessly slow is drained, where that is wanted.
        slowest = max(medians, key=lambda rank: medians[rank])
        others = [s for rank, s in medians.items() if rank != slowest]
        if self.mode == "drain" and others and medians[slowest] > HOPELESS * median(others):
            self._rows.clear()
            _log.warning("rank %d takes more than %g times as long as the others: it is drained", slowest, HOPELESS)
            return DrainWanted(slowest)

        # What other quotas would gain: said, and done where that is wanted.
        ranks, before = tuple(medians), tuple(quotas[rank] for rank in medians)
        own_s = list(medians.values())
        after, longest_s = balanced_quotas(own_s, sum(before)), step_seconds(own_s, before)
        won = 1.0 - step_seconds(own_s, after) / longest_s
        if won < GAIN_WORTH or longest_s < SHORTEST_S or 0 in after:
            return None
        if slowest not in self._reported or self.mode != "alert":
            self._reported |= {slowest}
            _log.warning(
                "rank %d takes %.1f times as long per micro-batch as the fastest: quotas %s instead of %s make "
                "computing %.0f %% shorter%s",
                *(slowest, medians[slowest] / min(medians.values()), after, before, 100 * won),
                "" if self.mode == "rebalance" else " (on_straggler='rebalance')",
            )
        if self.mode != "rebalance":
            return None
        self._rows.clear()
        self.done.append((Rebalance(ranks, before, after, won, longest_s), None))
        return QuotasWanted(tuple(zip(ranks, after, strict=True)))

    def _measure_gain(self, quotas: Mapping[int, int]) -> None:
        """Log what the latest change has gained, once its quotas have been in force for a window."""
        if not self.done or self.done[-1][1] is not None:
            return
        change = self.done[-1][0]
        if tuple(quotas.get(rank) for rank in change.ranks) != change.after:
            return
        took = median(max(row[rank] * quotas[rank] for rank in change.ranks) for row in self._rows)
        measured = 1.0 - took / change.seconds_before
        self.done[-1] = change, measured
        _log.info("new quotas: computing takes %.0f %% less, %.0f %% foretold", 100 * measured, 100 * change.predicted)

"""Which meter goes with a verdict on a rank's own time."""

from __future__ import annotations

import math
from typing import Protocol

from numpy.typing import ArrayLike

from ringside.monitor.price import Meter
from ringside.monitor.slow_rank.pauses import PauseMeter, is_of_pauses
from ringside.monitor.verdict import Verdict


class PriceMeter(Protocol):
    """The price of one open verdict while the run goes on."""

    @property
    def rank_seconds(self) -> float:
        """The price so far."""

    def add(self, own: ArrayLike) -> None:
        """Take in steps, float [steps, ranks] of own seconds."""


def meter_of(verdict: Verdict) -> PriceMeter:
    """Return a meter that goes on from the price of a verdict on one rank."""
    if is_of_pauses(verdict):
        return PauseMeter(verdict)
    usual = math.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))
    return Meter(verdict.ranks[0], math.log1p(verdict.excess_ratio), usual, verdict.cost_rank_seconds)

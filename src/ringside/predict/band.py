"""A figure, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """A figure with its 95 % band: a duration in seconds, or a rate.

    Args:
        value: The middle.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float, float]:
        """All three."""
        return self.value, self.low, self.high

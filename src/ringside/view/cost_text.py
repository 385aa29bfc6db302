"""What a verdict costs, in words: rank-hours, and money where it is known what an hour of a rank costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringside.monitor.price import known_rate, money
from ringside.text import rank_time


def cost_text(rank_seconds: float, summary: Mapping[str, Any] | None = None) -> str:
    """Return a price: `10.2 rank-hours`, or `10.2 rank-hours (25.50 at 2.5 an hour)` where there is a rate.

    Args:
        rank_seconds: It.
        summary: Of the run, which may have a rate; otherwise it is that of this process.
    """
    rate = known_rate(summary)
    words = rank_time(rank_seconds)
    if rate is None:
        return words
    amount = money(rank_seconds, rate)
    return f"{words} ({'under 0.01' if 0 < amount < 0.005 else f'{amount:,.2f}'} at {rate:.12g} an hour)"

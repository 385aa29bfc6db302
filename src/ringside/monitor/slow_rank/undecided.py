"""What the test of windows suspects and has not decided, and what it would have found by now."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

from ringside.monitor.slow_rank.streams import REST, WHOLE
from ringside.monitor.slow_rank.window_test import EFFECT, WindowTest
from ringside.monitor.stats import SMALLEST
from ringside.monitor.undecided import SLOWEST, Suspect


def suspects_of(screen: WindowTest, number: Callable[[int], int]) -> list[Suspect]:
    """Return the ranks that may be slow, the likeliest first.

    Args:
        screen: The test.
        number: The training step after so many steps.
    """
    shares, lengths = screen.nearest()
    likeliest: dict[int, Suspect] = {}
    for stream, rank in np.argwhere((shares >= SLOWEST) & ~screen.open.any(axis=0)).tolist():
        share, length = float(shares[stream, rank]), int(lengths[stream, rank])
        height = screen.height(stream, rank, length)
        if height < EFFECT / 2 or (stream != WHOLE and not screen.is_borne(stream, rank, length, height)):
            continue
        if rank not in likeliest or share > likeliest[rank].bar_ratio:
            chance = NormalDist().cdf(-share * screen.z) * shares.size
            likeliest[rank] = Suspect(
                rank=rank,
                since_step=number(screen.steps - length),
                excess_ratio=math.expm1(height),
                bar_ratio=share,
                healthy_steps=round(1.0 / chance) if chance > SMALLEST else 0,
            )
    return sorted(likeliest.values(), key=lambda suspect: -suspect.bar_ratio)


def would_find(screen: WindowTest) -> dict[int, float]:
    """Return the excess ratio of any rank that would have been named by now, by the steps within which."""
    # What takes longer in all phases shows in the whole, or without the waits for a CPU. The loudest rank counts.
    whole = [WHOLE, REST] if len(screen.open) > 1 else [WHOLE]
    least = {length: float(np.expm1(of[whole].min(axis=0).max())) for length, of in screen.least().items()}
    return {length: ratio for length, ratio in least.items() if math.isfinite(ratio)}

"""Whether an episode is over, by what few great steps cannot spoil: medians, and how few of the last steps are late.

`screen.py` ends an episode when the mean of a window is surely too small for it, and the noise of means is what it
learnt from all that happened, interruptions included. Where those are rough and rare, that takes hundreds of steps
although everybody sees at once that it is over. For few ranks.
"""

from __future__ import annotations

import numpy as np

from ringside.monitor.excess import Floats
from ringside.monitor.robust import CUT, EFFICIENCY, MEDIAN, core_scale, raised_autocorrelation
from ringside.monitor.student import student
from ringside.monitor.wander import decay, mixed_variance

LENGTHS = (12, 18, 24, 36, 48, 96)
"""Steps whose median is held against the bar."""

CERTAIN = 3.7
"""Standard deviations by which it must stay below."""

LATE = 1 / 3
"""Of the window no more than this may lie above the bar: who is late in every other step is not mended."""

SURE = 0.5
"""Standard errors between the estimated autocorrelation and the one that is reckoned with."""

SMALLEST = 0.004
"""No noise is taken for smaller than this."""


def is_over(before: Floats, since: Floats, bar: float) -> bool:
    """Whether the level of the newest steps is surely below a bar.

    Args:
        before: Log excess of the rank before the episode, which tells of its noise, [steps]; NaN where missing.
        since: Log excess since the alarm, oldest first, [steps].
        bar: What the log excess of a rank in the episode is above in most steps.
    """
    before = before[np.isfinite(before)]
    for length in LENGTHS:
        window = since[-length:]
        window = window[np.isfinite(window)]
        if length > len(since) or 2 * len(window) < length:
            continue
        if np.mean(window > bar) <= LATE and float(np.median(window)) + _reach(before, window) <= bar:
            return True
    return False


def _reach(before: Floats, window: Floats) -> float:
    """Return how far chance may take the median of the window from its level."""
    cores = [side - np.median(side) for side in (before, window) if len(side)]
    known = sum(len(core) for core in cores)
    scale = max(core_scale(np.concatenate(cores)), SMALLEST)
    core = np.concatenate([np.clip(core, -CUT * scale, CUT * scale) for core in cores])
    first, second = (raised_autocorrelation(core, lag, np.intp(known), SURE) for lag in (1, 2))
    later = decay(first, second, np.intp(known))
    variance = MEDIAN * mixed_variance(np.float64(len(window)), first, later)
    freedom = EFFICIENCY * known * (1.0 - later**2) / (1.0 + later**2)
    return float(student(CERTAIN, np.maximum(freedom, 1.0)) * scale * np.sqrt(variance))

"""An episode of a job: a share that stays high for long enough begins one, and one that stays low ends it. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WARM_UP_STEPS = 10
"""First steps of a job, which build buckets and caches: they count for nothing."""

WINDOW_STEPS = 32
"""The median over so many steps is judged: single steps, however long, decide nothing."""

PATIENCE = 2.0
"""Every episode that ends makes the next one need so many times as long: one that stays at the bar has few."""


@dataclass
class Episode:
    """One kind of trouble of a whole job.

    Args:
        begins_at: It begins when the median share is at least this ...
        ends_at: ... and ends when it is below this.
        seconds: For how long the share must be that high (and as many steps as are judged at once).
    """

    begins_at: float
    ends_at: float
    seconds: float
    since_step: int = -1
    is_open: bool = False
    _shares: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _steps: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _seen: int = 0
    _held: float = 0.0

    @property
    def share(self) -> float:
        """The median share of the steps judged; 0 before the first."""
        return median(self._shares) if self._shares else 0.0

    @property
    def is_high(self) -> bool:
        """Whether the share is as high as in an episode, for however short a time."""
        return len(self._shares) == WINDOW_STEPS and self.share >= self.begins_at

    def update(self, step: int, share: float, step_seconds: float) -> bool:
        """Take in a step; return whether the episode began or ended at it (`is_open`: which).

        Args:
            step: The training step.
            share: Its share.
            step_seconds: Its duration.
        """
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return False
        self._shares.append(share)
        self._steps.append(step)
        self._seconds.append(step_seconds)
        if len(self._shares) < WINDOW_STEPS:
            return False
        middle = self.share
        if self.is_open:
            self.is_open = middle >= self.ends_at
            if not self.is_open:
                self.seconds, self._held, self.since_step = PATIENCE * self.seconds, 0.0, self._steps[0]
            return not self.is_open
        if middle < self.begins_at:
            self._held = 0.0
            return False
        if not self._held:
            # It began with the first high step of those that are judged.
            kept = list(zip(self._steps, self._shares, self._seconds, strict=True))
            self.since_step = next(number for number, high, _ in kept if high >= self.begins_at)
            earlier = [seconds for number, _, seconds in kept if number < self.since_step]
            self._held = sum(self._seconds) - sum(earlier)
        else:
            self._held += step_seconds
        self.is_open = self._held >= self.seconds
        return self.is_open

    def reset(self) -> None:
        """Begin anew: what was seen has another reason."""
        self._shares.clear()
        self._steps.clear()
        self._seconds.clear()
        self._held = 0.0

    @property
    def until_step(self) -> int:
        """The first step that was no longer as in the episode, once it has ended."""
        return next((step for step, share in zip(self._steps, self._shares, strict=True) if share < self.ends_at), 0)

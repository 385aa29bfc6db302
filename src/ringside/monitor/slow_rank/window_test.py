"""The detector's one test: whether the mean log excess of a window is more than chance gives, at every step.

Two ways to be news: a window's mean, of steps that are cut close to the usual, lies far above the usual; or it lies far
above the window right before. See docs/design/0002-detector.md for why it is built like this and what it reaches.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.slow_rank.noise import CUTS, TOLERATED, Noise, learn
from ringside.monitor.stats import Floats, divergence, known_median, known_or_0, median

# What is tested of a job: whole own times, the phases they are made of, and waits for a CPU.
PARTS = ("data", "forward", "backward", "optimizer")
"""Phases that are judged beside the whole: 12 ms more of a loader are certain long before a noisy own time is."""

STREAMS = 1 + len(PARTS) + 3
"""The whole, its parts, what it was delayed for want of a CPU, the rest without that, and the rest per sample."""
WHOLE, DELAY, REST, PER_SAMPLE = 0, STREAMS - 3, STREAMS - 2, STREAMS - 1

EFFECT = math.log(1.05)
"""The effect gate: nothing below 5% is ever reported."""

PERSISTENCE = 5
"""No alarm rests on fewer late steps than this."""

MOST, MOST_OF_SHORT, SHORT = 0.6, 2 / 3, 12
"""Nor on less than this share of its window's steps, of windows up to `SHORT` on less than two in three."""

WINDOWS = ((5, 6, 8, 10, 12, 16, 20, 24), (28, 32, 40, 48, 56, 64, 80), (96, 112, 128, 160, 192))
"""Steps whose mean excess is judged: short ones find much at once, long ones find little in noise. The noise of each
class is learnt from the steps before its longest window: what may be the beginning of an episode teaches nothing."""

EVERY = (1, 4, 8)
"""Steps between two looks at the windows of each class."""

WARM_UP = 3
"""Steps at the start that count for nothing: allocations, DDP's bucket rebuild, cold caches."""

FALSE_ALARM_STEPS = 864_000
"""Job steps in which each of the windows gives one false alarm; those of similar length give the same ones. The streams
that are tested share that rate, each an equal part (union bound): together they keep it whatever their dependence."""

JUMP_SHARE = 0.8
"""Of what the means of two windows must differ by, the difference of their medians must be so much."""

FEWEST, FEWEST_BEFORE = 7, 20
"""Steps without which nothing is known of the noise; before windows that are not short."""

YOUNG, OLD, YOUNG_SHARE = 80, 256, 0.45
"""Up to so many steps noise is learnt often, and from so many on seldom. In a young job no short window is longer than
this share of all its steps."""

MEMORY, MEMORY_CELLS = 576, 1 << 15
"""Noise is learnt from so many steps at most; of many ranks from fewer, so many numbers, but 64 steps at least."""

KEPT = MEMORY + WINDOWS[-1][-1]
"""Steps that are remembered."""

GONE_SCALES = 0.7
"""An episode may be over where most steps lie no further than what is tolerated above the usual, or so many standard
deviations of the noise's core, and below half of the excess."""

MENDED_SHARE, MENDED_NEPERS, MOST_LATE = 0.3, 9.0, 0.95
"""No more than this share of them may be late, and that must be so rare (e^-9) where as many steps are late as in the
episode up to then, of which never more than nearly all are taken to be."""


LONG = 48
"""Steps of which the whole's median tells whether a part still holds anybody up."""


class WindowTest:
    """Watches `[streams, ranks]` of log excess; an episode opens when a window's mean is too great and closes after.

    The first stream is the whole own time. A part of it is news only where the whole bears it: what moves from one
    phase to another costs nobody anything. What is an episode in one stream teaches none of the others.

    Args:
        streams: How many streams of a job are tested: all `STREAMS`, or the first.
        ranks: How many ranks it has.

    Attributes:
        steps: How many steps were seen.
        z: How many standard deviations as rare as a false alarm may be.
        open: Which ranks are in an episode, bool [streams, ranks].
        usual: What each rank usually exceeds the others by, as far as that is known, [streams, ranks].
        onset: Number of steps before the episode that opened last, int [streams, ranks]; 0 where that was in warm-up.
        contrast: How far above the usual the window that opened it lay, in standard deviations of the noise's core.
        relief: Number of steps before the excess began to be missing, int [streams, ranks]: where an episode ended.
    """

    def __init__(self, streams: int, ranks: int) -> None:
        shape = (streams, ranks)
        self.steps = 0
        self.open = np.zeros(shape, dtype=bool)
        self.usual, self._height, self.contrast = np.zeros((3, *shape))
        self.onset, self.relief, self._opened = np.zeros((3, *shape), dtype=np.int64)
        self.z = NormalDist().inv_cdf(1.0 - 1.0 / (FALSE_ALARM_STEPS * streams * ranks))
        self._memory = min(max(MEMORY_CELLS // ranks, 64), MEMORY)
        self._excess = np.full((KEPT, *shape), np.nan)
        self._slow = np.zeros((KEPT, *shape), dtype=bool)  # steps of episodes, which teach nothing
        # By class of windows: their lengths, their noise, what its sums must reach, and sums of cut excess up to each
        # step, to which step.
        self._lengths = [np.array(windows) for windows in WINDOWS]
        self._noise: list[Noise | None] = [None] * len(WINDOWS)
        self._bars = [np.empty(0)] * len(WINDOWS)
        self._sums = np.zeros((len(WINDOWS), KEPT, len(CUTS), *shape), dtype=np.float32)
        self._summed = [0] * len(WINDOWS)

    def update(self, excess: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Take in one step of log excess [streams, ranks]; return who just opened and who just closed an episode."""
        self.steps += 1
        slot = self.steps % KEPT
        self._excess[slot] = excess
        self._slow[slot] = self.open
        opened = closed = np.zeros(self.open.shape, dtype=bool)
        for which, every in enumerate(EVERY):
            if self.steps % every == 0:
                self._learn(which)
                noise = self._noise[which]
                if noise is not None:
                    opened = opened | self._judge(which, noise)
        if self.open.any():
            closed = self._close(opened)
            self.open &= ~closed
        return opened, closed

    def _learn(self, which: int) -> None:
        """Learn the noise of a class of windows again, if it is time, and cut the excess that is kept by it."""
        seen = self.steps - WARM_UP
        often = 4 if seen < YOUNG else (16 if seen < OLD else 32) * (1 if self._memory == MEMORY else 4)
        if self._noise[which] is not None and self.steps % often:
            return
        lengths = self._lengths[which]
        lengths = lengths[lengths <= (YOUNG_SHARE * seen if which == 0 else seen - FEWEST_BEFORE)]
        until = self.steps - int(max(lengths, default=0))
        numbers = np.arange(max(until - self._memory, WARM_UP) + 1, until + 1) % KEPT
        if len(lengths) == 0 or len(numbers) < FEWEST:
            return
        slow, rows = self._slow[numbers], self._excess[numbers]
        if slow.any():
            slow[:] = slow.any(axis=1, keepdims=True)
            if self.open.shape[1] <= 3:  # the others' excess mirrors a culprit's
                slow[:] = slow.any(axis=2, keepdims=True)
            is_known = (~slow).sum(axis=0).max(axis=1)[:, None] >= FEWEST  # else an episode is all there is
            rows[slow & is_known] = np.nan
        self._noise[which] = noise = learn(rows, lengths, self.z)
        unknown = (~np.isnan(rows)).sum(axis=0) < FEWEST
        noise.bars[..., unknown] = noise.jumps[:, unknown] = np.inf
        self._bars[which] = np.concatenate([noise.bars, noise.jumps[:, None]], axis=1)
        if which == 0:
            self.usual = noise.usual
        self._summed[which] = max(self.steps - 2 * int(lengths[-1]), 0)
        self._sums[which, self._summed[which] % KEPT] = 0.0

    def _judge(self, which: int, noise: Noise) -> NDArray[np.bool_]:
        """Return who is news by one class of windows, [streams, ranks]."""
        new = np.arange(self._summed[which] + 1, self.steps + 1) % KEPT
        last, limits = self._sums[which, self._summed[which] % KEPT], noise.limits.astype(np.float32)
        over = known_or_0(self._excess[new, None] - noise.base).astype(np.float32)
        self._sums[which, new] = last + np.add.accumulate(np.minimum(np.maximum(over, -limits), limits))
        self._summed[which] = self.steps
        lengths = self._lengths[which][: len(noise.jumps)]
        sums, steps = self._sums[which], lengths.reshape(-1, 1, 1)
        now, then = sums[self.steps % KEPT], sums[(self.steps - lengths) % KEPT]
        inside = now - then  # [windows, cuts, streams, ranks]
        opened = np.zeros(self.open.shape, dtype=bool)
        reached = inside >= self._bars[which]  # a jump that is news takes that much above the usual, too
        if not reached.any():
            return opened
        seen = self.steps - np.maximum(self.relief, WARM_UP)
        level = reached[:, :-1].any(axis=1)
        news = level & (steps <= seen) & ~self.open
        if which == 0:
            earlier = then[:, -1] - sums[(self.steps - 2 * lengths) % KEPT, -1]
            jumps = inside[:, -1] - np.maximum(earlier, 0.0) >= noise.jumps
            news |= jumps & (2 * steps <= seen) & ~self.open
        for stream, rank in np.argwhere(news.any(axis=0)):
            base = float(noise.base[stream, rank])
            for index in np.flatnonzero(news[:, stream, rank]):
                length = int(lengths[index])
                rows = self._rows(self.steps - 2 * length, stream, rank)
                before, rows = known_median(rows[:-length]), rows[-length:][~np.isnan(rows[-length:])]
                height = known_median(rows)
                # Few great steps may have lifted a mean that is cut so wide: the medians must tell of a jump as well.
                jump = (height - max(before, base)) * length
                if not level[index, stream, rank] and jump < JUMP_SHARE * noise.jumps[index, stream, rank]:
                    continue
                if stream and not self.is_borne(int(stream), int(rank), length, height - base):
                    continue
                late = int((rows > (base + height) / 2).sum())
                fewest = max(PERSISTENCE, (MOST_OF_SHORT if length <= SHORT else MOST) * length)
                if height - base >= EFFECT and late >= fewest:
                    opened[stream, rank] = True
                    self._begin(int(stream), int(rank), height, noise)
                    break
        return opened

    def is_borne(self, part: int, rank: int, length: int, rise: float) -> bool:
        """Return whether the whole takes longer as well, and no other phase less: time may move between them.

        Where waits for a CPU are known, what a phase takes longer for want of one is for their own stream to tell, and
        the rest must bear it.

        Args:
            part: The stream that rose.
            rank: Whose.
            length: In how many of the newest steps.
            rise: By how much.
        """
        rows = self._excess[np.arange(self.steps - length + 1, self.steps + 1) % KEPT, :, rank]
        above = median(rows) - self.usual[:, rank]
        whole, moved = above[WHOLE], False
        if part < DELAY:
            whole = np.fmin(whole, above[REST])
            moved = any(above[phase] < -rise / 2.0 for phase in range(1, DELAY) if phase != part)
        return bool(whole >= max(EFFECT, rise / 2.0)) and not moved

    def _lasts(self, part: int, rank: int, length: int) -> bool:
        """Return whether a part's episode may go on: it is known, and the whole has not been as usual for long."""
        if np.isnan(self._rows(self.steps - length, part, rank)).all():
            return False
        whole = known_median(self._rows(self.steps - length, 0, rank), math.inf)
        return length < LONG or whole - float(self.usual[0, rank]) >= EFFECT / 2.0

    def _begin(self, stream: int, rank: int, height: float, noise: Noise) -> None:
        """Note an episode: since when, and what it takes to be over."""
        base, scale = float(noise.base[stream, rank]), float(noise.limits[0, stream, 0]) / CUTS[0]
        onset = self._change(stream, rank, int(self.relief[stream, rank]), (base + height) / 2.0, 1.0)
        self.open[stream, rank] = True
        self.onset[stream, rank] = 0 if onset <= WARM_UP else onset
        self._opened[stream, rank] = self.steps
        self.contrast[stream, rank] = (height - base) / scale
        self._height[stream, rank] = base + min((height - base) / 2, max(TOLERATED, GONE_SCALES * scale))
        self._slow[np.arange(max(onset, self.steps - KEPT) + 1, self.steps + 1) % KEPT, stream, rank] = True

    def _close(self, opened: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return whose episode is over: few of the last steps are late, too few for chance, [streams, ranks].

        Chernoff's bound (1952) on a binomial tail, for as many independent steps as a window's mean is worth.
        """
        closed = np.zeros_like(self.open)
        noise = self._noise[0]
        if noise is None:
            return closed
        for stream, rank in np.argwhere(self.open & ~opened):
            height = float(self._height[stream, rank])
            since = self._rows(int(self._opened[stream, rank]), stream, rank)
            whole = self._rows(int(self.onset[stream, rank]), stream, rank) > height
            worth = 1.0 / max(float(noise.inflation[-1, stream, 0]), 1.0)
            for length in map(int, np.concatenate(self._lengths)):
                if length > len(since):
                    break
                if stream and not self._lasts(int(stream), int(rank), length):
                    closed[stream, rank] = True
                    self.relief[stream, rank] = self.steps - length
                    self._slow[np.arange(self.steps - length + 1, self.steps + 1) % KEPT, stream, rank] = False
                    break
                rows = since[-length:][~np.isnan(since[-length:])]
                late = min(max(float(np.mean(whole[:-length])), MOST), MOST_LATE)
                rare = length * worth * divergence(1.0 - MENDED_SHARE, 1.0 - late)
                if rare >= MENDED_NEPERS and 2 * len(rows) >= length and np.mean(rows > height) <= MENDED_SHARE:
                    closed[stream, rank] = True
                    first = int(self._opened[stream, rank]) - PERSISTENCE
                    relief = self._change(int(stream), int(rank), first, height, -1.0)
                    self.relief[stream, rank] = relief
                    self._slow[np.arange(relief + 1, self.steps + 1) % KEPT, stream, rank] = False
                    break
        return closed

    def nearest(self) -> tuple[Floats, NDArray[np.int64]]:
        """Return how near each is to its bar, as a share of it, and by how many steps, [streams, ranks]."""
        best, lengths = np.zeros(self.open.shape), np.zeros(self.open.shape, dtype=np.int64)
        for which, noise in enumerate(self._noise):
            for index, bars in enumerate(() if noise is None else noise.bars):
                length = int(self._lengths[which][index])
                begin = max(self._summed[which] - length, 0)
                inside = self._sums[which, self._summed[which] % KEPT, :-1] - self._sums[which, begin % KEPT, :-1]
                share = (inside / bars).max(axis=0)
                is_nearer = (share > best) & (length <= self._summed[which] - np.maximum(self.relief, WARM_UP))
                best, lengths = np.where(is_nearer, share, best), np.where(is_nearer, length, lengths)
        return best, lengths

    def height(self, stream: int, rank: int, length: int) -> float:
        """Return how far above the usual the median of the newest steps lies."""
        return known_median(self._rows(self.steps - length, stream, rank)) - float(self.usual[stream, rank])

    def least(self) -> dict[int, Floats]:
        """Return the excess that the longest window of each class would name, [streams, ranks], by its length.

        Longer windows than half of all steps count for nothing: their bars rest on fewer steps than they hold.
        """
        found = {}
        for lengths, noise in zip(self._lengths, self._noise, strict=True):
            if noise is not None and (known := int((2 * lengths[: len(noise.jumps)] <= self.steps).sum())):
                length = int(lengths[known - 1])
                found[length] = np.maximum(noise.bars[known - 1].min(axis=0) / length, EFFECT)
        return found

    def _rows(self, first: int, stream: int, rank: int) -> Floats:
        """Log excess of the steps numbered first < step, as far as they are remembered."""
        rows: Floats = self._excess[np.arange(max(first, self.steps - KEPT) + 1, self.steps + 1) % KEPT, stream, rank]
        return rows

    def _change(self, stream: int, rank: int, first: int, middle: float, sign: float) -> int:
        """Return the number of steps before the excess went beyond `middle`: where the sum of the rest is greatest.

        For a step between two levels that is the likeliest place (Page 1955).
        """
        first = max(first, self.steps - KEPT, WARM_UP)
        beyond = np.nan_to_num(np.clip(sign * (self._rows(first, stream, rank) - middle), -abs(middle), abs(middle)))
        return first + int(np.argmax(np.cumsum(beyond[::-1])[::-1]))

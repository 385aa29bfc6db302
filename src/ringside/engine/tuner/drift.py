"""Whether all-reduces take longer than they should: a state machine over timings. No clock, no messages of its own."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

LARGE_BYTES = 1 << 20
EVERY_LARGE, EVERY_MIDDLE = 4, 8
_MIDDLE_BYTES = 3 << 20  # below, a vote takes a tenth of what an all-reduce takes
EVERY_NOTED, EVERY_SMALL = 8, 8  # of the small ones one in eight is noted, and of those one in eight asks
DRIFT, DRIFT_SMALL = 1.25, 2.5  # small ones hang on how busy the cores are more than on the network
_LEARNED = 3  # first timings of a class, from which what is usual there is learned
_MOST_USUAL = 1.5  # what is learned from them at most; slower than that is drift at once
_MOST_TRIED = 1.25  # likewise, where the job's own all-reduces have said what to expect
_RECENT = 4
_LONGER = 8  # timings that have to say so, where it is not pressing
_MOST_WANDERS = 1.4  # so that a link at half of its rate is heard in any noise
_NEAR = 1.1  # where a level has been now and then, a tenth more is nothing new
_FASTER = 0.8  # of what is usual: a pace that replaces it
_PRESSING = 1.8  # a level that is heard even in a pause; of small ones none is
_SHARE = 0.02  # of the time, for revisions that small all-reduces ask for, or that change nothing
_LEVELS = 64  # of the past, by which is told how much the level wanders by itself
_LEAST_LEVELS = 16
_WANDERS = 0.95  # quantile of them, which counts as usual
_PAUSE = 32  # collectives of a class after a revision that changed nothing; doubled each time


@dataclass(eq=False)
class _SizeClass:
    """What one rank has seen of one size class."""

    first: list[float] = field(default_factory=list)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    longer: deque[float] = field(default_factory=lambda: deque(maxlen=_LONGER))
    levels: deque[float] = field(default_factory=lambda: deque(maxlen=_LEVELS + 2 * _RECENT))
    usual: float = 0.0
    seen: int = 0
    resume: int = 0
    pause: int = _PAUSE
    most_usual: float = _MOST_USUAL

    def add(self, ratio: float) -> None:
        """Record a ratio once it is known what is usual."""
        self.recent.append(ratio)
        self.longer.append(ratio)
        if len(self.recent) == _RECENT and self.seen >= self.resume:
            self.levels.append(sorted(self.recent)[1])

    def level(self, pressing: float) -> float:
        """Return the second smallest of the last ratios over what is usual, or over what it rose to by itself before.

        Unless that is pressing, twice as many have to say so: all of them but two.
        """
        past = sorted(list(self.levels)[: -2 * _RECENT])  # of ratios that are not among those judged, nor next to them
        wanders = past[int(_WANDERS * (len(past) - 1))] if len(past) >= _LEAST_LEVELS else 0.0
        own = min(max(wanders / _NEAR / self.usual, 1.0), _MOST_WANDERS)
        level = sorted(self.recent)[1] / (own * self.usual)
        if level > pressing:
            return level
        return min(level, sorted(self.longer)[2] / (own * self.usual)) if len(self.longer) == _LONGER else 0.0


class Drift:
    """Running ratios of measured to expected time, by size class.

    The level of a class is the second smallest of its last four ratios, over what is usual: three of four all-reduces
    took at least that. Where training itself slows everything down by the same factor, that factor is usual. Where the
    level wanders by itself, on a machine that is busy now and then, what it has risen to before is nothing new.

    Args:
        bounds: Sizes at which one class ends and the next begins, ascending.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = list(bounds)
        self._classes: defaultdict[int, _SizeClass] = defaultdict(_SizeClass)
        self._large = self._small = 0
        self._due = 0

    def observe(self, size_bytes: int, ratio: float | None) -> None:
        """Record measured over expected time of an all-reduce; None: not known, but the all-reduce counts."""
        size_class = self._classes[bisect_left(self._bounds, size_bytes)]
        size_class.seen += 1
        if ratio is None:
            return
        if size_class.usual:
            size_class.add(ratio)
            if len(size_class.recent) == _RECENT and median(size_class.recent) < _FASTER * size_class.usual:
                size_class.usual = median(size_class.recent)  # what was learned in a busy moment
            return
        size_class.first.append(ratio)
        if len(size_class.first) == _LEARNED:
            size_class.usual = min(max(median(size_class.first), 0.5), size_class.most_usual)
            size_class.recent.extend(size_class.first)
            size_class.longer.extend(size_class.first)

    def tried(self, size_bytes: int) -> None:
        """Record that what is expected of this class was found in the job's own all-reduces: little else is usual."""
        self._classes[bisect_left(self._bounds, size_bytes)].most_usual = _MOST_TRIED

    def due(self, size_bytes: int) -> bool:
        """Return whether to vote after an all-reduce of this size; call once for each. Equal on all ranks."""
        self._due = bisect_left(self._bounds, size_bytes)
        if size_bytes >= LARGE_BYTES:
            self._large += EVERY_MIDDLE // EVERY_LARGE if size_bytes >= _MIDDLE_BYTES else 1
            due = self._large >= EVERY_MIDDLE
            self._large = 0 if due else self._large
            return due
        self._small += 1
        return self._small % EVERY_SMALL == 0

    @property
    def bar(self) -> float:
        """The level from which on it is drift, for the class that is due."""
        return DRIFT_SMALL if self._is_small else DRIFT

    @property
    def _is_small(self) -> bool:
        """Whether the class that is due is one of small all-reduces, which are noted now and then."""
        return self._due < len(self._bounds) and self._bounds[self._due] < LARGE_BYTES

    @property
    def level(self) -> float:
        """How much longer than usual all-reduces of the class that is due take, on this rank; 0: not known."""
        size_class = self._classes[self._due]
        if not size_class.usual or len(size_class.recent) < _RECENT:
            return 0.0
        pressing = math.inf if self._is_small else _PRESSING
        level = size_class.level(pressing)
        return level if size_class.seen >= size_class.resume or level > pressing else 0.0

    def revised(self, *, changed: bool, cost: float = 0.0) -> None:
        """Forget the timings: the table is another, or the same as before and the present pace is usual.

        What small ones take hangs on the cores: they ask again only when that costs little, whatever came of it.

        Args:
            changed: Whether anything in the table did.
            cost: What timing and deciding took, in all-reduces of the class that is due.
        """
        size_class = self._classes[self._due]
        pause = max(size_class.pause, math.ceil(cost / _SHARE / (EVERY_NOTED if self._is_small else 1)))
        if changed:
            self._classes.clear()
            if not self._is_small:
                return
        fresh = self._classes[self._due] = _SizeClass(
            seen=size_class.seen, resume=size_class.seen + pause, pause=2 * pause
        )
        if not changed:
            fresh.levels = size_class.levels
            fresh.usual = median(size_class.recent) if size_class.recent else 0.0

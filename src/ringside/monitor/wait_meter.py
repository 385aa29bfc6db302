"""What this rank issues in watched groups, when, and for how long it is blocked in them; pure, with injected clocks.

Waits that begin in Python are seen. One that begins in C++ (a functional collective's, DDP's) is not: it lies between
zero and what passed from the issue to the collective's end, or to the next thing this rank issued. But whether a rank
waits at one place of its program is the same in every step. If it does, what it issues next follows the *end*, and
comes later the longer the others let it wait; if it does not, it follows the issue, whatever the others do. So per
place the time to the next issue is regressed on the time to the end: the slope is one where the rank waits, else zero.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from ringside.isolation import Guard
from ringside.monitor.run.records import Group, GroupUse
from ringside.monitor.step_clock import GroupSums

MOST_ISSUED = 20_000
"""Of a step with more (a long evaluation in it) the rest is counted and not looked into."""
MEMORY = 0.97
"""What a step weighs less than the one after it, in the slope of a place."""
FEWEST = 12
"""Steps before anything is said of a place."""
ERRORS = 2.0
"""So many standard errors a slope must lie above one half, or below."""
MOST_PLACES = 4096
"""Places of a program that changes from step to step would pile up: then all is learnt anew."""

Key = tuple[str, int]
"""A group's name, and the rank at the other end of a message; -1: a collective."""


class Issued:
    """One collective or message of this rank.

    Args:
        meter: Whose it is.
        key: In which group, and with whom.
        arrived: When it was issued, seconds.

    Attributes:
        nth: Which one of its key it is in the step.
        number: Which one it is of this rank's collectives in its group, from 1; 0: a message.
        over: When it was over; NaN: not known.
        next_at: When this rank issued the next thing; NaN: not yet.
        is_waited_for: Whether a wait for it was seen.
    """

    __slots__ = ("arrived", "is_waited_for", "key", "meter", "next_at", "nth", "number", "over")

    def __init__(self, meter: WaitMeter, key: Key, arrived: float) -> None:
        self.meter, self.key, self.arrived = meter, key, arrived
        self.nth = self.number = 0
        self.over = self.next_at = math.nan
        self.is_waited_for = False

    def timed(self, wait: Callable[..., Any], *args: Any) -> Any:
        """Wait for it."""
        meter = self.meter
        began = meter.now()
        is_training = threading.get_ident() == meter.thread
        if is_training:
            meter.waiting = self
        try:
            return wait(*args)
        finally:
            if is_training:
                meter.waiting = None
            meter.guard.run(meter.waited_for, self, began)

    def ended(self, _: Any = None) -> None:
        """It is over; on any thread."""
        self.over = self.meter.now()


class WatchedGroup:
    """A group, as this rank knows it.

    Args:
        name: torch's.
        description: torch's.
        ranks: Returns its global ranks, once torch knows them.
    """

    def __init__(self, name: str, description: str, ranks: Callable[[], list[int]]) -> None:
        self.name, self.description, self._ranks = name, description, ranks
        self._known: list[int] | None = None

    @property
    def ranks(self) -> list[int]:
        """Its global ranks, in their order in the group."""
        if self._known is None:
            self._known = self._ranks()
        return self._known


class WaitMeter:
    """Adds up what one process does in its groups, step by step.

    Args:
        rank: This process's global rank.
        on_wait: Called with the seconds of every wait of the training thread.
        now: Monotonic seconds.

    Attributes:
        now: As given.
        guard: Keeps what breaks in here away from training.
        is_muted: What is issued now is timed by somebody else, and does not count.
        thread: The thread that trains.
        moves: How often it has issued something or gone on after a wait.
        waiting: What the training thread waits for; None: nothing.
        counts: How many collectives this rank has issued in each group.
        places: What is known of places at which no wait was seen.
        seen: Places of the program (in a group and with a peer, which one of the step) at which a wait was seen, and in
            how many steps since then none was.
    """

    def __init__(
        self, rank: int, on_wait: Callable[[float], None], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.now = now
        self.guard = Guard("watching process groups")
        self._rank, self._on_wait = rank, on_wait
        self.is_muted = False
        self.thread = threading.get_ident()
        self.moves = 0
        self.waiting: Issued | None = None
        self.counts: Counter[str] = Counter()
        self._uses: defaultdict[Key, list[float]] = defaultdict(lambda: [0, 0, 0.0])  # count, bytes, blocked
        self._issued: list[Issued] = []
        self._groups: dict[str, WatchedGroup] = {}
        self._told: set[Key] = set()
        self.seen: dict[tuple[Key, int], int] = {}
        self.places: dict[tuple[Key, int], _Place] = {}

    def add(self, group: WatchedGroup) -> None:
        """A group was made; it may have the name of one that is gone."""
        self._groups[group.name] = group
        self.counts[group.name] = 0
        self._told = {key for key in self._told if key[0] != group.name}

    def issue(self, name: str, peer: int, size_bytes: int) -> Issued | None:
        """This rank issues something in a group; None: it does not count.

        Args:
            name: The group's.
            peer: The global rank at the other end; -1: it is a collective.
            size_bytes: What it carries.
        """
        if self.is_muted:
            return None
        now = self.now()
        key = (name, peer)
        issued = Issued(self, key, now)
        use = self._uses[key]
        issued.nth = int(use[0])
        use[0] += 1
        use[1] += size_bytes
        self.moves += 1
        if peer < 0:
            self.counts[name] += 1
            issued.number = self.counts[name]
        if threading.get_ident() == self.thread and len(self._issued) < MOST_ISSUED:
            if self._issued:
                self._issued[-1].next_at = now
            self._issued.append(issued)
        return issued

    def waited_for(self, issued: Issued, began: float) -> None:
        """A wait that began at a moment is over now."""
        issued.is_waited_for = True
        self.moves += 1
        self.seen[issued.key, issued.nth] = 0
        if threading.get_ident() != self.thread:
            return  # training goes on meanwhile
        seconds = self.now() - began
        self._uses[issued.key][2] += seconds
        self._on_wait(seconds)

    def synchronised(self, name: str, after: int, seconds: float) -> bool:
        """A wait in C++ is over for what was issued in a group; see `ringside.monitor.step_clock.GroupMeter`."""
        key = (name, -1)
        waited = [one for one in self._issued if one.key == key and one.number > after and not one.is_waited_for]
        for issued in waited:
            issued.is_waited_for = True
            self.seen[key, issued.nth] = 0
        if waited:
            self.moves += 1
            self._uses[key][2] += seconds
        return bool(waited)

    @property
    def has_issued(self) -> bool:
        """Whether anything was issued since the last call of `take`."""
        return bool(self._uses)

    def is_seen(self, issued: Issued) -> bool:
        """Return whether a wait at this place of the program was seen lately, so that its end is no news."""
        return (issued.key, issued.nth) in self.seen

    def take(self) -> StepGroups:
        """Set apart what was done since the last call; on the thread that trains."""
        self.thread = threading.get_ident()
        issued, self._issued = self._issued, []
        if issued:
            issued[-1].next_at = self.now()
        uses = dict(self._uses)
        self._uses.clear()
        if len(self.seen) > MOST_PLACES:
            self.seen.clear()
        without_wait = [one for one in issued if not one.is_waited_for]
        for place in {(one.key, one.nth) for one in without_wait} & self.seen.keys():
            # It may be waited for in the next step; in two on end it is another program than it was.
            self.seen[place] += 1
            if self.seen[place] > 1:
                del self.seen[place]
        # The first of a group's ranks says who is in it; whoever sends a message, that there are some.
        news = []
        for name, peer in uses.keys() - self._told:
            self._told.add((name, peer))
            group = self._groups.get(name)
            if group is not None and (peer >= 0 or group.ranks[0] == self._rank):
                news.append(
                    Group(name=name, description=group.description, ranks=tuple(group.ranks), has_messages=peer >= 0)
                )
        return StepGroups(self, without_wait, uses, tuple(news))

    def awaited(self) -> tuple[str, int, list[int]] | None:
        """Return in which group the training thread waits, for which of its collectives, and who is needed for it.

        Of a message the number is 0; None: it does not wait. On any thread.
        """
        issued = self.waiting
        if issued is None:
            return None
        name, peer = issued.key
        return name, issued.number, [peer] if peer >= 0 else self._groups[name].ranks

    def unseen(self, issued: Issued) -> tuple[float, float]:
        """Return how long this rank waited for something though no wait was seen, and how long it may have, beyond.

        Call it for every step in order: it is learnt from what was seen of the same place in earlier steps.
        """
        place = (issued.key, issued.nth)
        if place in self.seen or math.isnan(issued.next_at):
            return 0.0, 0.0
        if math.isnan(issued.over):  # it does not tell; a message that is sent is seldom waited for
            return 0.0, issued.next_at - issued.arrived if issued.number else 0.0
        if len(self.places) > MOST_PLACES:
            self.places.clear()
        known = self.places.get(place) or self.places.setdefault(place, _Place())
        until_over, until_next = issued.over - issued.arrived, issued.next_at - issued.arrived
        known.add(until_over, until_next)
        most = max(min(until_over, until_next), 0.0)
        waits = known.waits()
        if waits is None:
            return 0.0, most
        return (most, 0.0) if waits else (0.0, 0.0)


class StepGroups:
    """What was done in one step; see `ringside.monitor.step_clock.GroupTimes`."""

    def __init__(
        self, meter: WaitMeter, issued: list[Issued], uses: dict[Key, list[float]], news: tuple[Group, ...]
    ) -> None:
        self._meter, self._issued, self._uses, self._news = meter, issued, uses, news

    def work_out(self) -> GroupSums:
        """Return what it comes to."""
        unseen = unclear = 0.0
        for issued in self._issued:
            waited, more = self._meter.unseen(issued)
            self._uses[issued.key][2] += waited
            unseen += waited
            unclear += more
        uses = tuple(
            GroupUse(group=name, peer=peer, count=int(count), size_bytes=int(size_bytes), blocked_seconds=blocked)
            for (name, peer), (count, size_bytes, blocked) in self._uses.items()
        )
        return GroupSums(uses, unseen, unclear, self._news)


class _Place:
    """The slope, at one place of the program, of the time to the next issue over the time to the collective's end."""

    __slots__ = ("count", "sums")

    def __init__(self) -> None:
        self.count = 0.0
        self.sums = [0.0] * 5  # of x, y, x², xy, y²

    def add(self, x: float, y: float) -> None:
        self.count = MEMORY * self.count + 1.0
        self.sums = [MEMORY * old + new for old, new in zip(self.sums, (x, y, x * x, x * y, y * y), strict=True)]

    def waits(self) -> bool | None:
        """Return whether this rank waits here; None: that is not clear yet."""
        n = self.count
        if n < FEWEST:
            return None
        x, y, xx, xy, yy = (one / n for one in self.sums)
        var_x, cov, var_y = xx - x * x, xy - x * y, yy - y * y
        if var_x <= 0.0:
            return None
        slope = cov / var_x
        error = math.sqrt(max(var_y - slope * cov, 0.0) / var_x / n)
        if abs(slope - 0.5) <= ERRORS * error:
            return None
        return slope > 0.5

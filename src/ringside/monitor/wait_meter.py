"""What this rank issues in watched groups, when, and for how long it is blocked in them; pure, with injected clocks.

Waits that begin in Python are seen. One that begins in C++ (a functional collective's, DDP's) is not: it lies between
zero and what passed from the issue to the collective's end, or to the next thing this rank issued. But whether a rank
waits at one place of its program is the same in every step. If it does, what it issues next follows the *end*, and
comes later the longer the others let it wait; if it does not, it follows the issue, whatever the others do. So per
place the time to the next issue is regressed on the time to the end: the slope is one where the rank waits, else zero.

On a device the moments are marks in its queues (`ringside.monitor.device_marks`), and are read when it has come to
them. There a collective may run on a queue of its own, and training waits for it later than at the next issue: so what
comes between two issues is regressed on the end of each of the last few collectives, and the best one counts.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ringside.isolation import Guard
from ringside.monitor.device_marks import DeviceEvents
from ringside.monitor.run.records import Group, GroupUse

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
MOST_UNFINISHED = 4096
"""Collectives that are queued on a device; of more, the oldest are not known to a hang watch."""
OUTSTANDING = 4
"""On a device: so many of the last collectives may be what training waits for."""

Key = tuple[str, int]
"""A group's name, and the rank at the other end of a message; -1: a collective."""


class GroupSums(NamedTuple):
    """What a rank did in process groups in one step.

    Args:
        uses: By group and peer.
        unseen_seconds: How long it waited where that was not seen, and follows from what was.
        unclear_seconds: How long it may have waited beyond that.
        new_groups: Groups that it used for the first time.
        routed_bytes: What it sent or received in all-to-alls, of each the larger.
    """

    uses: tuple[GroupUse, ...] = ()
    unseen_seconds: float = 0.0
    unclear_seconds: float = 0.0
    new_groups: tuple[Group, ...] = ()
    routed_bytes: int = 0


class Issued:
    """One collective or message of this rank.

    Args:
        meter: Whose it is.
        key: In which group, and with whom.
        nth: Which one of its key it is in the step.

    Attributes:
        arrived: The moment at which it was issued: seconds, or on a device how far training had come.
        number: Which one it is of this rank's collectives in its group, from 1; 0: a message.
        over: The moment at which it was over; NaN: not known.
        next_at: `arrived` of what this rank issued next; NaN: not yet.
        times: `arrived`, `over` and `next_at` in seconds, once they are read.
        first_wait, next_wait: How many waits of the step were seen before it was issued, and before the next thing was.
        is_inline: Whether it is carried out where it is issued, so that a wait for it begins there.
        is_waited_for: Whether a wait for it was seen.
    """

    # Training waits while one is made: what is set later, if at all, is the class's until then.
    arrived: Any = math.nan
    number = 0
    over: Any = math.nan
    next_at: Any = math.nan
    times = (math.nan, math.nan, math.nan)
    first_wait = next_wait = 0
    is_inline = is_waited_for = False

    def __init__(self, meter: WaitMeter, key: Key, nth: int) -> None:
        self.meter, self.key, self.nth = meter, key, nth

    def timed(self, wait: Callable[..., Any], *args: Any) -> Any:
        """Wait for it."""
        meter = self.meter
        is_here = threading.get_ident() == meter.thread
        began = meter.guard.run(meter.wait_begins, self)
        if is_here:
            meter.waiting = self
        try:
            return wait(*args)
        finally:
            if is_here:
                meter.waiting = None
            meter.guard.run(meter.waited_for, self, began)

    def ended(self, _: Any = None) -> None:
        """It is over; on any thread."""
        device = self.meter.device
        self.over = self.meter.now() if device is None else device.mark_alone()


class WatchedGroup:
    """A group, as this rank knows it.

    Args:
        name: torch's.
        description: torch's.
        ranks: Returns its global ranks, once torch knows them.
    """

    def __init__(self, name: str, description: str, ranks: Callable[[], list[int]]) -> None:
        self.name, self.description, self._ranks = name, description, ranks

    @functools.cached_property
    def ranks(self) -> list[int]:
        """Its global ranks, in their order in the group."""
        return self._ranks()


class WaitMeter:
    """Adds up what one process does in its groups, step by step.

    Args:
        rank: This process's global rank.
        on_wait: Called with the two moments of every wait of the training thread.
        now: Monotonic seconds.

    Attributes:
        now: As given.
        device: Training's device, whose marks are the moments; None: seconds of the host are.
        guard: Keeps what breaks in here away from training.
        is_muted: What is issued now is timed by somebody else, and does not count.
        thread: The thread that trains.
        moves: How often it has issued something or gone on after a wait.
        waiting: What the training thread waits for; None: nothing.
        unfinished: What a device may not be done with yet, oldest first; its end is, or will be, known.
        counts: How many collectives this rank has issued in each group.
        places: What is known of places at which no wait was seen.
        seen: Places of the program (in a group and with a peer, which one of the step) at which a wait was seen, and in
            how many steps since then none was.
    """

    def __init__(
        self, rank: int, on_wait: Callable[[Any, Any], None], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.now = now
        self.device: DeviceEvents | None = None
        self.guard = Guard("watching process groups")
        self._rank, self._on_wait = rank, on_wait
        self.is_muted = False
        self.thread = threading.get_ident()
        self.moves = 0
        self.waiting: Issued | None = None
        self.counts: Counter[str] = Counter()
        self._uses: defaultdict[Key, list[Any]] = defaultdict(lambda: [0, 0, 0.0])  # count, bytes, blocked
        self._routed_bytes = 0
        self._issued: list[Issued] = []
        self._waits: list[tuple[Key, Any, Any]] = []  # for what, and the moments between which this rank was blocked
        self.unfinished: deque[Issued] = deque(maxlen=MOST_UNFINISHED)
        self._groups: dict[str, WatchedGroup] = {}
        self._told: set[Key] = set()
        self.seen: dict[tuple[Key, int], int] = {}
        self.places: dict[tuple[Key, int, int], _Place] = {}

    def use_device(self, device: DeviceEvents) -> None:
        """From now on the moments are marks of a device; what is known of places is learnt anew."""
        self.device = device
        self._issued, self._waits = [], []
        self._uses.clear()
        self._routed_bytes = 0
        self.seen.clear()
        self.places.clear()

    def add(self, group: WatchedGroup) -> None:
        """A group was made; it may have the name of one that is gone."""
        self._groups[group.name] = group
        self.counts[group.name] = 0
        self._told = {key for key in self._told if key[0] != group.name}

    def issue(self, name: str, peer: int, size_bytes: int, *, is_routed: bool = False) -> Issued | None:
        """This rank issues something in a group; None: it does not count.

        Args:
            name: The group's.
            peer: The global rank at the other end; -1: it is a collective.
            size_bytes: What it carries.
            is_routed: It is an all-to-all: how much this rank sends and receives is its own.
        """
        if self.is_muted:
            return None
        key = (name, peer)
        use = self._uses[key]
        issued = Issued(self, key, use[0])
        use[0] += 1
        use[1] += size_bytes
        if is_routed:
            self._routed_bytes += size_bytes
        self.moves += 1
        if peer < 0:
            self.counts[name] = issued.number = self.counts[name] + 1
        # The backward pass of a device has a thread of its own.
        device, others = self.device, self._issued
        if (device is not None or threading.get_ident() == self.thread) and len(others) < MOST_ISSUED:
            before = others[-1] if others else None
            # A mark costs several microseconds: none where the waits on both sides of it are seen.
            if device is None or not (self.is_seen(issued) and (before is None or self.is_seen(before))):
                issued.arrived = arrived = self.now() if device is None else device.mark()
                if before is not None:
                    before.next_at = arrived
            issued.first_wait = seen = len(self._waits)
            if before is not None:
                before.next_wait = seen
            others.append(issued)
        return issued

    def issue_on_host(self, name: str) -> None:
        """This rank issues a collective of host tensors, though training is on a device: that is not timed."""
        self.moves += 1
        self.counts[name] += 1

    def wait_begins(self, issued: Issued) -> Any:
        """Return the moment at which a wait begins; None: not on the training thread, or in another queue."""
        if self.device is None:
            return self.now() if threading.get_ident() == self.thread else None
        if not self.device.is_training():
            return None
        return issued.arrived if issued.is_inline and issued.arrived is not math.nan else self.device.mark()

    def waited_for(self, issued: Issued, began: Any) -> None:
        """A wait that began at a moment (`wait_begins`) is over now."""
        self.moves += 1
        ended = None if began is None else self._moment()
        if self.device is not None:
            # In another queue: training may come to need it later.
            issued.over = self.device.mark_here() if began is None else ended
            self.unfinished.append(issued)
        if began is not None or self.device is None:
            self.count_as_waited(issued)
        if began is None:
            return  # training goes on meanwhile
        if len(self._waits) < MOST_ISSUED:
            self._waits.append((issued.key, began, ended))
        self._on_wait(began, ended)

    def count_as_waited(self, issued: Issued) -> None:
        """A wait for this, or for something else that ends with it, is seen."""
        issued.is_waited_for = True
        self.seen[issued.key, issued.nth] = 0

    def _moment(self) -> Any:
        return self.now() if self.device is None else self.device.mark()

    def synchronised(self, name: str, after: int, began: Any, ended: Any) -> bool:
        """A wait in C++ is over for all collectives that were issued in a group and not waited for in Python.

        Args:
            name: The group's.
            after: Those after so many.
            began, ended: The moments between which it was: marks of a device, else seconds of the host.

        Returns:
            Whether there were any.
        """
        key = (name, -1)
        waited = [one for one in self._issued if one.key == key and one.number > after and not one.is_waited_for]
        for issued in waited:
            self.count_as_waited(issued)
            if self.device is not None and issued.over is math.nan:
                issued.over = ended
        if waited:
            self.moves += 1
            if len(self._waits) < MOST_ISSUED:
                self._waits.append((key, began, ended))
        return bool(waited)

    @property
    def has_issued(self) -> bool:
        """Whether anything was issued since the last call of `end_step`."""
        return bool(self._uses)

    def is_seen(self, issued: Issued) -> bool:
        """Return whether a wait at this place of the program was seen lately, so that its end is no news."""
        return (issued.key, issued.nth) in self.seen

    def end_step(self) -> Callable[[], GroupSums]:
        """Set apart what was done since the last call; on the thread that trains.

        Returns:
            What works out what it comes to: once, at any later time, on any thread, step by step in order.
        """
        self.thread = threading.get_ident()
        if self.device is not None:
            self.device.trains_here()
        issued, self._issued = self._issued, []
        waits, self._waits = self._waits, []
        if issued:
            issued[-1].next_at, issued[-1].next_wait = self._moment(), len(waits)
        uses = dict(self._uses)
        self._uses.clear()
        routed_bytes, self._routed_bytes = self._routed_bytes, 0
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
        return functools.partial(self._work_out, without_wait, waits, uses, tuple(news), routed_bytes)

    def awaited(self) -> tuple[str, int, list[int]] | None:
        """Return in which group the training thread waits, for which of its collectives, and who is needed for it.

        On a device the thread waits for what that is not done with. Of a message the number is 0; None: it does not
        wait. On any thread, one at a time.
        """
        issued = self.waiting
        while issued is None and self.device is not None and self.unfinished:
            first = self.unfinished[0]
            if first.over is math.nan or (first.over is not None and not self.device.reached((first.over,))):
                issued = first
            else:
                self.unfinished.popleft()
        if issued is None:
            return None
        name, peer = issued.key
        return name, issued.number, [peer] if peer >= 0 else self._groups[name].ranks

    def unseen(self, issued: Issued, before: Sequence[Issued], seen: float = 0.0) -> tuple[Key, float, float]:
        """Return how long this rank waited before it issued the next thing though no wait was seen.

        Call it for every step in order: it is learnt from what was seen of the same place in earlier steps.

        Args:
            issued: What begins the time that is looked at.
            before: What it may be waiting for: itself, and what was issued before it and not waited for; newest first.
            seen: For how long it was blocked in that time in waits that were seen.

        Returns:
            For what, how long it waited, and how long it may have beyond, seconds.
        """
        arrived, over, next_at = issued.times
        place = (issued.key, issued.nth)
        if place in self.seen or math.isnan(next_at):
            return issued.key, 0.0, 0.0
        if math.isnan(over):  # it does not tell; a message that is sent is seldom waited for, but by a device's queue
            may_wait = issued.number or self.device is not None
            return issued.key, 0.0, max(next_at - arrived - seen, 0.0) if may_wait else 0.0
        if len(self.places) > MOST_PLACES:
            self.places.clear()
        until_next = next_at - arrived - seen
        unclear, found, best = 0.0, (issued.key, 0.0), math.inf
        for distance, other in enumerate(before):
            known = self.places.setdefault((*place, distance), _Place())
            until_over = other.times[1] - arrived - seen
            if math.isnan(until_over) or (distance and until_over <= 0.0):
                until_over = 0.0  # nothing is left to wait for
            known.add(until_over, until_next)
            most = max(min(until_over, until_next), 0.0)
            waits = known.waits()
            if waits is None:
                unclear = max(unclear, most)
            elif waits and known.residual < best:
                found, best = (other.key, most), known.residual
        return *found, max(unclear - found[1], 0.0) if best < math.inf else unclear

    def _work_out(
        self,
        without_wait: list[Issued],
        waits: list[tuple[Key, Any, Any]],
        uses: dict[Key, list[Any]],
        news: tuple[Group, ...],
        routed_bytes: int,
    ) -> GroupSums:
        # The moments in seconds: those of a device are marks, which it has come to by now or not.
        if self.device is not None:
            of_issued = [mark for one in without_wait for mark in (one.arrived, one.over, one.next_at)]
            of_waits = [mark for _, *both in waits for mark in both]
            marks = [None if mark is math.nan else mark for mark in (*of_issued, *of_waits)]
            times = iter(self.device.times(next((mark for mark in marks if mark is not None), None), marks))
            for one in without_wait:
                one.times = next(times), next(times), next(times)
            blocked = [-next(times) + next(times) for _ in waits]
        else:
            blocked = [ended - began for _, began, ended in waits]
            for one in without_wait:
                one.times = one.arrived, one.over, one.next_at

        # Waits that were seen, and what follows of those that were not.
        for (key, *_), seconds in zip(waits, blocked, strict=True):
            if not math.isnan(seconds):
                uses.setdefault(key, [0, 0, 0.0])[2] += seconds  # it may have been issued in an earlier step
        unseen = unclear = 0.0
        outstanding = 1 if self.device is None else OUTSTANDING
        for number, issued in enumerate(without_wait):
            before = without_wait[max(number + 1 - outstanding, 0) : number + 1][::-1]
            key, waited, more = self.unseen(issued, before, math.fsum(blocked[issued.first_wait : issued.next_wait]))
            uses[key][2] += waited
            unseen += waited
            unclear += more
        done = tuple(GroupUse(name, peer, *numbers) for (name, peer), numbers in uses.items())
        return GroupSums(done, unseen, unclear, news, routed_bytes)


class _Place:
    """The slope, at one place of the program, of the time to the next issue over the time to a collective's end.

    Attributes:
        residual: What of the variance is left unexplained, seconds².
    """

    __slots__ = ("count", "residual", "sums")

    def __init__(self) -> None:
        self.count = 0.0
        self.residual = math.inf
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
        self.residual = max(var_y - slope * cov, 0.0)
        error = math.sqrt(self.residual / var_x / n)
        if abs(slope - 0.5) <= ERRORS * error:
            return None
        return slope > 0.5

"""Which link is slow: pure judgement over the rates of links, against their own past and against the others'.

A link is judged by the rate at which bytes cross it while they do, never by how long a collective takes: in a ring all
links wait for the slowest, and a late rank makes all of them idle.

Both rates that are known of a period are only lower bounds: bytes over wire time counts acknowledgements that came late
as well, and the kernel's own rate is missing in many periods, and stray in some. A period without the latter looks slow
beside those with it; so both must be small, each against its own kind.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from ringside.monitor.links.sampler import Link
from ringside.monitor.run.records import Wire

SLOW = 0.5
"""A link is slow if its rate is below this share of its usual rate in every one of ..."""
LASTING = 3
"""... so many periods on end, in which it was worth ..."""
WORTH = 0.05
"""... this share of the time, beyond what the same bytes take at the usual rate."""
SLOW_OF_OTHERS = 0.4
"""One that was never faster is slow below this share of the other links' median, in twice as many periods."""
LOOKED_INTO = 0.6
"""... which is worked out for links whose rate is below this share of the median of all."""
OWN_FAULT = 0.7
"""A link has become slow of itself if it lost so much more than the others: at most this share of what they kept."""
MEAN = 1.2
"""Bytes over wire time, against what is usual for that, may be so much above these bars: part of it is waiting."""
RELIEVED = 0.7
"""It is over when every one of the last periods is above this share of the usual rate."""

LEAST_PERIOD_BYTES = 1 << 18
LEAST_WIRE_S = 0.02
"""Periods with fewer bytes, or in which they crossed within a few of the kernel's ticks, accuse nobody."""
SETTLING = 2
"""First periods of a link, with slow start and warm-up."""
LEARNT = 5
"""Periods from which a link's own usual rate is known."""
KEPT = 60
SILENT_S = 30.0
"""A link that carries nothing for so long is not slow any more: it is not used."""


class Period(NamedTuple):
    """What one link did in one period.

    Args:
        step: The first step that ended in it, on the sender.
        seconds: Its length.
        sent_bytes: What it carried.
        wire_seconds: For how long.
        bytes_per_s: Its rate: the larger of `mean_bytes_per_s` and the kernel's own.
    """

    step: int
    seconds: float
    sent_bytes: int
    wire_seconds: float
    bytes_per_s: float

    @property
    def mean_bytes_per_s(self) -> float:
        """Bytes over wire time; 0 where there was none."""
        return self.sent_bytes / self.wire_seconds if self.wire_seconds else 0.0


class Usual(NamedTuple):
    """What a link is held against, bytes per second; both 0 while it is not known.

    Args:
        rate: The larger of both rates of a period.
        mean: Bytes over wire time.
    """

    rate: float = 0.0
    mean: float = 0.0


UNKNOWN = Usual()


class SlowLink(NamedTuple):
    """A link that is slow now.

    Args:
        link: Sending and receiving rank.
        since_step: First step of the first slow period.
        bytes_per_s: Its rate.
        usual: What it is compared with.
        against: Whose that is: `its own past` or `the other links`.
        extra_ratio: Share of the time it takes longer than it would at the usual rate.
        rtt_seconds: Round trip.
        retransmitted_bytes: Sent again in the newest period.
    """

    link: Link
    since_step: int
    bytes_per_s: float
    usual: Usual
    against: str
    extra_ratio: float
    rtt_seconds: float
    retransmitted_bytes: int


def combine_wires(step: int, wires: Sequence[Wire]) -> Period:
    """Return what the connections of one link did together, in the period that began with a step."""
    seconds = max(wire.seconds for wire in wires)
    return Period(
        step=step,
        seconds=seconds,
        sent_bytes=sum(wire.sent_bytes for wire in wires),
        wire_seconds=min(sum(wire.wire_seconds for wire in wires), seconds),
        bytes_per_s=sum(wire.bytes_per_s for wire in wires),
    )


@dataclass
class LinkState:
    """One link's periods.

    Attributes:
        usual: Its own usual rates. Not learnt from slow periods.
        slow: What is known while it is slow.
        heard_s: When it was last heard of, seconds of the job's own time.
    """

    usual: Usual = UNKNOWN
    slow: SlowLink | None = None
    heard_s: float = 0.0
    _seen: int = 0
    _next_step: int = 0
    _periods: deque[Period] = field(default_factory=lambda: deque(maxlen=2 * LASTING))
    _healthy: deque[Period] = field(default_factory=lambda: deque(maxlen=KEPT))
    _pending: deque[Period] = field(default_factory=deque)

    @property
    def recent(self) -> Usual:
        """Its rates over the last periods; 0 while there are too few."""
        last = list(self._periods)[-LASTING:]
        return median_rates(last) if len(last) == LASTING else UNKNOWN

    @property
    def kept(self) -> float:
        """Its rate as a share of its usual one; 0 where that is not known."""
        return self.recent.rate / self.usual.rate if self.usual.rate else 0.0

    @property
    def is_doubtful(self) -> bool:
        """Whether its last two periods were slow against its own past."""
        return len(self.slow_periods(self.usual, SLOW)) >= 2

    def add(self, step: int, wires: Sequence[Wire], now_s: float) -> bool:
        """Take in what the connections of the link did until a step, at `now_s`; return whether that counts."""
        period = combine_wires(self._next_step or step, wires)
        self._next_step, self.heard_s = step + 1, now_s
        if period.sent_bytes < LEAST_PERIOD_BYTES or not period.bytes_per_s:
            return False
        if period.wire_seconds < LEAST_WIRE_S and self.slow is None:
            return False
        self._seen += 1
        if self._seen <= SETTLING:
            return False
        self._periods.append(period)
        return True

    def learn(self) -> None:
        """Let the last period count for what is usual, once it is known that it was not the beginning of an end."""
        self._pending.append(self._periods[-1])
        if len(self._pending) > LASTING:
            self._healthy.append(self._pending.popleft())
        if len(self._healthy) >= LEARNT:
            self.usual = median_rates(self._healthy)

    def doubt(self) -> None:
        """The last periods were slow: they do not count for what is usual."""
        self._pending.clear()

    def slow_periods(self, usual: Usual, bar: float) -> list[Period]:
        """Return the newest periods that were all below a share of some rates."""
        found: list[Period] = []
        for period in reversed(self._periods):
            if period.bytes_per_s >= bar * usual.rate or period.mean_bytes_per_s >= MEAN * bar * usual.mean:
                break
            found.append(period)
        return found[::-1]

    def relief(self, usual: Usual) -> int | None:
        """Return since which step the last periods were all near a rate again; None: they were not."""
        last = list(self._periods)[-LASTING:]
        healthy = [
            period.bytes_per_s >= RELIEVED * usual.rate or period.mean_bytes_per_s >= RELIEVED * usual.mean
            for period in last
        ]
        return last[0].step if len(last) == LASTING and all(healthy) else None


def median_rates(periods: Iterable[Period]) -> Usual:
    """Return the medians of the rates of at least one period."""
    pairs = [(period.bytes_per_s, period.mean_bytes_per_s) for period in periods]
    return Usual(*(median(rates) for rates in zip(*pairs, strict=True)))


def median_rate(states: Iterable[LinkState]) -> float:
    """Return the median rate of all links over their last periods, bytes per second; 0 where none is known."""
    rates = [rate for state in states if (rate := state.recent.rate)]
    return median(rates) if rates else 0.0


def judge_link(
    link: Link, states: Mapping[Link, LinkState], wires: Sequence[Wire], middle: float = math.inf
) -> SlowLink | None:
    """Return what is wrong with a link whose newest period has just come in, if anything is.

    Args:
        link: The link.
        states: All links of the job.
        wires: What it carried in that period.
        middle: The median rate of all links, as far as it is known: faster ones are not compared with the others.
    """
    state = states[link]
    if not state.is_doubtful and state.recent.rate >= LOOKED_INTO * middle:
        return None  # most are, and comparing each with all others is dear
    others = _others(link, states)
    # What it may be held against: usual rates, bar as a share of them, periods, and whose rates these are.
    bars: list[tuple[Usual, float, int, str]] = []
    kept = [other.kept for other in others if other.kept]
    if state.usual.mean and (not kept or state.kept <= OWN_FAULT * min(median(kept), 1.0)):
        bars.append((state.usual, SLOW, LASTING, "its own past"))
    recent = [other.recent for other in others if other.recent.mean]
    if len(recent) >= 2:
        theirs = Usual(median(rates.rate for rates in recent), median(rates.mean for rates in recent))
        bars.append((theirs, SLOW_OF_OTHERS, 2 * LASTING, "the other links"))
    for usual, bar, lasting, against in bars:
        slow = state.slow_periods(usual, bar)
        extra = [max(period.wire_seconds - period.sent_bytes / usual.mean, 0.0) / period.seconds for period in slow]
        if len(slow) >= lasting and median(extra) >= WORTH:
            return SlowLink(
                link=link,
                since_step=slow[0].step,
                bytes_per_s=median(period.bytes_per_s for period in slow),
                usual=usual,
                against=against,
                extra_ratio=median(extra),
                rtt_seconds=max(wire.rtt_seconds for wire in wires),
                retransmitted_bytes=sum(wire.retransmitted_bytes for wire in wires),
            )
    return None


def _others(link: Link, states: Mapping[Link, LinkState]) -> list[LinkState]:
    """The links that share no direction of an end's interface with this one, if there are any; else all but it.

    A slow interface makes all links slow that leave through it (and all that enter): those are no measure.
    """
    src, dst = link
    apart = [state for (a, b), state in states.items() if a != src and b != dst and {a, b} != {src, dst}]
    if len(apart) >= 2:
        return apart
    return [state for other, state in states.items() if other not in (link, (dst, src))]

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

from ringside.monitor.job.watcher import JobStep, add_cost, job_step, median_step, with_cost
from ringside.monitor.links.sampler import Link, Period, combine_wires, wires_by_link
from ringside.monitor.run.records import Row, Wire
from ringside.monitor.verdict import Evidence, Verdict, VerdictEvent, episode_end
from ringside.text import rate

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


# -------------------------------------------------------------------------------------------------
# The watcher of links: `slow_link`, one verdict for links that are slow together.

KEPT_STEPS = 256
MIDDLE_S = 0.5
MOST_LINKS = 4096
"""Links that are watched at most; those that appear later are not."""
SHOWN_LINKS = 6

ADVICE = (
    "Look at this path: the negotiated speed and the errors of both interfaces (ethtool), who else uses it, its cable "
    "and its switch port; ringside probe measures every pair. A ring can be ordered round one slow link."
)
HOST_ADVICE = (
    "Look at this host's network interface: its negotiated speed and errors (ethtool), who else uses it, its cable and "
    "its switch port; or leave the host out."
)


class LinkWatcher:
    """Names links between hosts that are slow.

    Args:
        ranks: Number of ranks.
        hosts: Host of each rank, in rank order, where it is known: links that are slow together may be one host's.
    """

    def __init__(self, ranks: int, hosts: Sequence[str] = ()) -> None:
        self._ranks, self._hosts = ranks, list(hosts)
        self._states: dict[Link, LinkState] = {}
        self._recent: deque[JobStep] = deque(maxlen=KEPT_STEPS)
        self._open: dict[Link, Verdict] = {}
        self._with: dict[Link, set[Link]] = {}
        self._doubtful: set[Link] = set()
        self._clock_s = 0.0
        self._middle, self._middle_at = 0.0, -math.inf
        self._relief = 0

    @property
    def suspects(self) -> bool:
        """Whether some link is slow, or may turn out to be."""
        return bool(self._open or self._doubtful)

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""
        return list(self._open.values())

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Watcher`."""
        if not self._states and not any(record.wires for record in row.values()):
            return []
        current = job_step(step, row)
        self._recent.append(current)
        self._clock_s += current.step_seconds
        for link, verdict in self._open.items():
            self._open[link] = add_cost(verdict, current, self._ranks)
        slow: list[SlowLink] = []
        for record in row.values():
            for link, wires in wires_by_link(record).items():
                if (found := self._judge(link, record.step, wires)) is not None:
                    slow.append(found)
        events = []
        # A verdict ends when all its links are as fast as before, or carry nothing any more.
        for home in list(self._open):
            links = self._with[home]
            if all(self._states[link].slow is None or self._is_silent(link) for link in links):
                for link in self._with.pop(home):
                    self._states[link].slow = None
                verdict = self._open.pop(home)
                until = self._relief if verdict.since_step < self._relief <= step else step
                events.append(episode_end(verdict, until))
        # Worst first; a link that shares an end with an open verdict's joins that one.
        begun = []
        for found in sorted(slow, key=lambda slow_link: slow_link.bytes_per_s / slow_link.usual.rate):
            joins = [home for home, links in self._with.items() if any(set(found.link) & set(link) for link in links)]
            if not joins:
                self._with[found.link] = {found.link}
                begun.append(found)
            else:
                self._with[joins[0]].add(found.link)
        return [*events, *(self._open_verdict(found, step) for found in begun)]

    def _judge(self, link: Link, step: int, wires: Sequence[Wire]) -> SlowLink | None:
        """Take in what a link carried in a period; return it if it has become slow."""
        state = self._states.get(link)
        if state is None:
            if len(self._states) >= MOST_LINKS:
                return None
            state = self._states[link] = LinkState()
        if not state.add(step, wires, self._clock_s):
            return None
        if state.slow is not None:
            relief = state.relief(state.slow.usual)
            if relief is not None:
                state.slow, self._relief = None, relief
            return None
        # The median rate of all links is at most half a second of the job old: with many links it is dear.
        if self._clock_s >= self._middle_at + MIDDLE_S:
            rates = [rate for other in self._states.values() if (rate := other.recent.rate)]
            self._middle, self._middle_at = median(rates) if rates else 0.0, self._clock_s
            self._doubtful = {doubtful for doubtful in self._doubtful if not self._is_silent(doubtful)}
        state.slow = judge_link(link, self._states, wires, self._middle)
        if state.slow is None and not state.is_doubtful:
            self._doubtful.discard(link)
            state.learn()
        else:
            self._doubtful.add(link)
            state.doubt()
        return state.slow

    def _open_verdict(self, slow: SlowLink, step: int) -> VerdictEvent:
        """Open the verdict on a link and those that are slow with it."""
        together = sorted(self._with[slow.link])
        # The one host that all of them begin or end at, if there is one and it is known.
        host = ""
        if len(together) > 1 and len(set(self._hosts)) > 1 and len(self._hosts) >= self._ranks:
            host = min(set.intersection(*({self._hosts[src], self._hosts[dst]} for src, dst in together)), default="")
        times = slow.usual.rate / slow.bytes_per_s
        cause = (
            f"bytes cross it at {rate(slow.bytes_per_s)}, {times:.2g} times slower than {slow.against} "
            f"({rate(slow.usual.rate)}), while the receiver has room for them: the wire is slow, not the rank"
        )
        evidence: Evidence = {
            "bytes_per_second": slow.bytes_per_s,
            "usual_bytes_per_second": slow.usual.rate,
            "against": slow.against,
            "extra_ratio": slow.extra_ratio,
            "rtt_seconds": slow.rtt_seconds,
            "retransmitted_bytes": slow.retransmitted_bytes,
        }
        if len(together) > 1:
            evidence["links"] = ", ".join(f"{src} → {dst}" for src, dst in together[:SHOWN_LINKS])
            cause += f"; with it {len(together) - 1} more of {host or 'its ends'}"

        # What is exposed beyond this is its price: what was exposed before, or, of a link that was never faster, what
        # would be at the others' rate.
        since = slow.since_step
        episode = [kept for kept in self._recent if kept.step >= since]
        before = [kept for kept in self._recent if kept.step < since]
        usual = median_step(before).exposed_seconds
        if slow.against == "the other links" or not before:
            now = median_step(episode)
            usual = now.exposed_seconds - min(slow.extra_ratio * now.step_seconds, now.exposed_seconds)
        verdict = Verdict(
            kind="slow_link",
            ranks=list(slow.link),
            since_step=since,
            detected_step=step,
            excess_ratio=times - 1.0,
            cause=cause,
            evidence={**evidence, "usual_exposed_seconds": usual},
            advice=HOST_ADVICE if host else ADVICE,
        )
        self._open[slow.link] = with_cost(verdict, episode, self._ranks)
        return VerdictEvent(self._open[slow.link], ended=False)

    def _is_silent(self, link: Link) -> bool:
        return self._clock_s - self._states[link].heard_s > SILENT_S

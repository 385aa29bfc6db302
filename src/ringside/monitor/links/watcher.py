"""The watcher of links: `slow_link`, one verdict for links that are slow together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from ringside.monitor.job.watcher import JobStep, cost_since, dearer, job_step, typical_step
from ringside.monitor.links.sampler import Link, wires_by_link
from ringside.monitor.links.slow_link import SILENT_S, LinkState, SlowLink, judge_link, middle_rate
from ringside.monitor.run.records import Wire
from ringside.monitor.verdict import Verdict, VerdictEvent
from ringside.monitor.watcher import Row

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
        one = job_step(step, row)
        self._recent.append(one)
        self._clock_s += one.step_seconds
        for link, verdict in self._open.items():
            self._open[link] = dearer(verdict, [one], self._ranks)
        slow: list[SlowLink] = []
        for record in row.values():
            for link, wires in wires_by_link(record).items():
                slow += self._hear(link, record.step, wires)
        ended = [self._end(link, step) for link in list(self._open) if self._is_over(link)]
        return [*ended, *self._begin(slow, step)]

    def _hear(self, link: Link, step: int, wires: Sequence[Wire]) -> list[SlowLink]:
        """Take in what a link carried in a period; return it if it has become slow."""
        state = self._states.get(link)
        if state is None:
            if len(self._states) >= MOST_LINKS:
                return []
            state = self._states[link] = LinkState()
        if not state.add(step, wires, self._clock_s):
            return []
        if state.slow is not None:
            relief = state.relief(state.slow.usual)
            if relief is not None:
                state.slow, self._relief = None, relief
            return []
        state.slow = judge_link(link, self._states, wires, self._middle_rate())
        if state.slow is None and not state.is_doubtful:
            self._doubtful.discard(link)
            state.learn()
            return []
        self._doubtful.add(link)
        state.doubt()
        return [] if state.slow is None else [state.slow]

    def _middle_rate(self) -> float:
        """The median rate of all links, at most half a second of the job old."""
        if self._clock_s >= self._middle_at + MIDDLE_S:
            self._middle, self._middle_at = middle_rate(self._states.values()), self._clock_s
            self._doubtful = {link for link in self._doubtful if not self._is_silent(link)}
        return self._middle

    def _begin(self, slow: Iterable[SlowLink], step: int) -> list[VerdictEvent]:
        """Open a verdict for links that have just become slow, worst first; one that shares an end joins another's."""
        found = []
        for one in sorted(slow, key=lambda one: one.bytes_per_s / one.usual.rate):
            home = next((link for link, all_of_it in self._with.items() if _touches(one.link, all_of_it)), None)
            if home is not None:
                self._with[home].add(one.link)
                continue
            self._with[one.link] = {one.link}
            found.append(one)
        return [self._open_verdict(one, step) for one in found]

    def _open_verdict(self, one: SlowLink, step: int) -> VerdictEvent:
        since = one.since_step
        verdict = self._verdict(one, step)
        episode = [kept for kept in self._recent if kept.step >= since]
        before = [kept for kept in self._recent if kept.step < since]
        usual = typical_step(before).exposed_seconds
        if one.against == "the other links" or not before:
            now = typical_step(episode)
            usual = now.exposed_seconds - min(one.extra_ratio * now.step_seconds, now.exposed_seconds)
        verdict = msgspec.structs.replace(verdict, evidence={**verdict.evidence, "usual_exposed_seconds": usual})
        cost = cost_since(verdict, episode, step - since + 1, self._ranks)
        self._open[one.link] = msgspec.structs.replace(verdict, cost_rank_seconds=cost)
        return VerdictEvent(self._open[one.link], ended=False)

    def _verdict(self, one: SlowLink, step: int) -> Verdict:
        together = sorted(self._with[one.link])
        host = self._common_host(together)
        times = one.usual.rate / one.bytes_per_s
        cause = (
            f"bytes cross it at {_rate(one.bytes_per_s)}, {times:.2g} times slower than {one.against} "
            f"({_rate(one.usual.rate)}), while the receiver has room for them: the wire is slow, not the rank"
        )
        evidence: dict[str, float | int | str] = {
            "bytes_per_second": one.bytes_per_s,
            "usual_bytes_per_second": one.usual.rate,
            "against": one.against,
            "extra_ratio": one.extra_ratio,
            "rtt_seconds": one.rtt_seconds,
            "retransmitted_bytes": one.retransmitted_bytes,
        }
        if len(together) > 1:
            evidence["links"] = ", ".join(f"{src} → {dst}" for src, dst in together[:SHOWN_LINKS])
            cause += f"; with it {len(together) - 1} more of {host or 'its ends'}"
        return Verdict(
            kind="slow_link",
            ranks=list(one.link),
            since_step=one.since_step,
            detected_step=step,
            excess_ratio=times - 1.0,
            cause=cause,
            evidence=evidence,
            advice=HOST_ADVICE if host else ADVICE,
        )

    def _common_host(self, links: Sequence[Link]) -> str:
        """The one host that all of some links begin or end at; empty if there is none, or it is not known."""
        if len(links) < 2 or len(set(self._hosts)) < 2 or len(self._hosts) < self._ranks:
            return ""
        common = set.intersection(*({self._hosts[src], self._hosts[dst]} for src, dst in links))
        return min(common, default="")

    def _is_over(self, home: Link) -> bool:
        return all(self._states[link].slow is None or self._is_silent(link) for link in self._with[home])

    def _is_silent(self, link: Link) -> bool:
        return self._clock_s - self._states[link].heard_s > SILENT_S

    def _end(self, home: Link, step: int) -> VerdictEvent:
        for link in self._with.pop(home):
            self._states[link].slow = None
        verdict = self._open.pop(home)
        until = self._relief if verdict.since_step < self._relief <= step else step
        return VerdictEvent(
            msgspec.structs.replace(verdict, evidence={**verdict.evidence, "until_step": until}), ended=True
        )


def _touches(link: Link, links: Iterable[Link]) -> bool:
    return any(set(link) & set(other) for other in links)


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.3g} MB/s"

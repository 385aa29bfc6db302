"""The watcher of links: `slow_link`, one verdict for links that are slow together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import msgspec

from ringside.monitor.job.watcher import JobStep, add_cost, cost_since, job_step, median_step
from ringside.monitor.links.sampler import Link, wires_by_link
from ringside.monitor.links.slow_link import SILENT_S, LinkState, SlowLink, judge_link, median_rate
from ringside.monitor.run.records import Wire
from ringside.monitor.verdict import Verdict, VerdictEvent
from ringside.monitor.watcher import Row
from ringside.text import rate

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
            self._open[link] = add_cost(verdict, [current], self._ranks)
        slow: list[SlowLink] = []
        for record in row.values():
            for link, wires in wires_by_link(record).items():
                found = self._judge(link, record.step, wires)
                if found is not None:
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
                evidence = {**verdict.evidence, "until_step": until}
                events.append(VerdictEvent(msgspec.structs.replace(verdict, evidence=evidence), ended=True))
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
            self._middle, self._middle_at = median_rate(self._states.values()), self._clock_s
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
        evidence: dict[str, float | int | str] = {
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
        cost = cost_since(verdict, episode, step - since + 1, self._ranks)
        self._open[slow.link] = msgspec.structs.replace(verdict, cost_rank_seconds=cost)
        return VerdictEvent(self._open[slow.link], ended=False)

    def _is_silent(self, link: Link) -> bool:
        return self._clock_s - self._states[link].heard_s > SILENT_S

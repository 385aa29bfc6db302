"""What plugs into the collector: watchers of a job, which see every completed step and return what began or ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ringside.monitor.job.watcher import LASTING_S, CommunicationBound, InputBound, JobWatcher, SmallCollectives
from ringside.monitor.links.watcher import LinkWatcher
from ringside.monitor.run.records import Row
from ringside.monitor.slow_rank.watcher import SlowRankWatcher
from ringside.monitor.verdict import Verdict, VerdictEvent


class Watcher(Protocol):
    """Judges some kinds of verdicts. Its memory does not grow with steps."""

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step, in order; return the episodes that began or ended at it, mostly none.

        A verdict that ended has its final price, and `until_step` in its evidence.
        """

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""


def standard_watchers(ranks: int, hosts: Sequence[str] = (), *, lasting_s: float = LASTING_S) -> list[Watcher]:
    """Return the watchers of every job: ranks' own times, links between hosts, and the job as a whole.

    A job is bound by communication only where neither a slow link nor small collectives explain it.

    Args:
        ranks: Number of ranks.
        hosts: Host of each rank, in rank order, where it is known.
        lasting_s: For how long a whole job must be held up before that is a verdict, seconds.
    """
    links, small = LinkWatcher(ranks, hosts), SmallCollectives(lasting_s)
    bound = CommunicationBound(Explained(links, small), lasting_s)
    return [SlowRankWatcher(ranks), links, JobWatcher(ranks, [small, bound, InputBound(lasting_s)])]


@dataclass(frozen=True)
class Explained:
    """Whether there is, or may be, a narrower reason for communication that takes long."""

    links: LinkWatcher
    small: SmallCollectives

    def __call__(self) -> bool:
        """Return whether there is."""
        return self.links.suspects or self.small.episode.is_open or self.small.episode.is_high

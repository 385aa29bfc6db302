"""What plugs into the collector: watchers of a job, which see every completed step and return what began or ended."""

from __future__ import annotations

from typing import Protocol

from ringside.monitor.run.records import StepRecord
from ringside.monitor.verdict import Verdict, VerdictEvent

Row = dict[int, StepRecord]
"""The records of one step, by rank; ranks may be missing."""


class Watcher(Protocol):
    """Judges some kinds of verdicts. Its memory does not grow with steps."""

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step, in order; return the episodes that began or ended at it, mostly none.

        A verdict that ended has its final price, and `until_step` in its evidence.
        """

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""

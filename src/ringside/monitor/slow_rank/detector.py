"""Find the rank that holds a job up: from own times to verdicts, over a whole run or one step at a time.

The method and what it reaches (recall, delay, false alarms per day) are in docs/design/0002-detector.md.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import ArrayLike

from ringside.errors import UsageError
from ringside.monitor.slow_rank.pauses import Pauses, is_of_pauses, judge_pauses, rejudge_pauses
from ringside.monitor.slow_rank.verdict import judge_excess
from ringside.monitor.slow_rank.window_test import WindowTest
from ringside.monitor.stats import Floats, log_excess, usable
from ringside.monitor.verdict import Verdict, VerdictEvent

WINDOW = 128
"""Steps the on-line detector keeps as evidence."""


class Detector:
    """Watches one job, step by step; memory is O(ranks) and does not grow with steps.

    Args:
        ranks: Number of ranks, at least 1 (one rank alone never holds up others).

    Raises:
        UsageError: There are no ranks.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise UsageError(f"a job has at least one rank; got {ranks}")
        self.ranks = ranks
        self._screen, self._pauses = WindowTest(1, ranks), Pauses(1, ranks)
        self._open: dict[int, Verdict] = {}
        self._own = np.full((WINDOW, ranks), np.nan)
        self._samples = np.full((WINDOW, ranks), np.nan)
        self._steps = np.zeros(WINDOW, dtype=np.int64)

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, in order of detection."""
        return list(self._open.values())

    def update(
        self, own: ArrayLike, samples: ArrayLike | None = None, *, step: int | None = None
    ) -> list[VerdictEvent]:
        """Take in one training step.

        Args:
            own: Own times in seconds, float [ranks]; whatever is not positive and finite counts as missing.
            samples: Samples (or tokens) each rank worked on, [ranks]; 0 or None where not known.
            step: Number of the training step; by default they are counted from 0.

        Returns:
            The episodes that began or ended at this step; mostly none.
        """
        row = usable(own)
        if row.shape != (self.ranks,):
            raise UsageError(f"own times of {self.ranks} ranks are needed; got an array of shape {row.shape}")
        slot = self._screen.steps % WINDOW
        self._own[slot] = row
        self._samples[slot] = np.nan if samples is None else usable(samples)
        self._steps[slot] = self._screen.steps if step is None else step
        opened, closed = self._screen.update(log_excess(row)[None])
        pausing, paused = self._pauses.update(row[None], self._screen.open)
        if not (opened.any() or closed.any() or pausing.any() or paused.any()):
            return []
        now = int(self._steps[slot])
        paused = paused | (opened & self._pauses.open)  # of a rank that is slow in every step pauses are no verdict
        events = []
        for rank in map(int, np.flatnonzero(paused[0])):
            events.append(self._end(rank, self._pauses.last[0, rank]))
            self._pauses.reset(0, rank)
        for rank in map(int, np.flatnonzero(closed[0])):
            events.append(self._end(rank, int(self._screen.relief[0, rank])))
        for rank in map(int, np.flatnonzero(opened[0])):
            self._open[rank] = self._judge_episode(rank, now)
            events.append(VerdictEvent(self._open[rank], ended=False))
        for rank in map(int, np.flatnonzero(pausing[0])):
            rhythm = self._pauses.rhythm[0, rank]
            since = self._number(rhythm.first - 1)
            self._open[rank] = judge_pauses(rank, rhythm, self.ranks, since_step=since, detected_step=now)
            events.append(VerdictEvent(self._open[rank], ended=False))
        return events

    def _end(self, rank: int, count: int) -> VerdictEvent:
        """Close a rank's episode, which was over after step count `count`."""
        verdict = self._open.pop(rank)
        evidence = {**verdict.evidence, "until_step": self._number(count)}
        return VerdictEvent(msgspec.structs.replace(verdict, evidence=evidence), ended=True)

    def _judge_episode(self, rank: int, now: int) -> Verdict:
        """Return the verdict on an episode that has just opened, from its steps as far back as the window reaches."""
        onset, total = int(self._screen.onset[0, rank]), self._screen.steps
        slots = np.arange(max(onset, total - WINDOW, 0), total) % WINDOW
        samples = self._samples[slots]
        return judge_excess(
            rank,
            self._own[slots],
            None if np.isnan(samples).all() else samples,
            since_step=self._number(onset) if onset else int(self._steps[slots[0]]),
            detected_step=now,
            usual=float(self._screen.usual[0, rank]) if onset > 0 else 0.0,  # there was no before
        )

    def _number(self, count: int) -> int:
        """Return the training step after step count `count`; one that is no longer kept is counted back to."""
        oldest = max(self._screen.steps - WINDOW, 0)
        return int(self._steps[max(count, oldest) % WINDOW]) - max(oldest - count, 0)


def detect(own_seconds: ArrayLike, samples: ArrayLike | None = None) -> list[Verdict]:
    """Find who held a run up, since when, by how much and at what price.

    A pure function that runs the on-line `Detector` over the rows and then judges every episode on all its steps.

    Args:
        own_seconds: Own times in seconds, float [steps, ranks]; NaN = missing, and so counts whatever is not
            positive and finite.
        samples: Samples (or tokens) each rank worked on, [steps, ranks]; None or 0 where not known. An excess that
            uneven sample counts explain gives `uneven_work` instead of `slow_rank`.

    Returns:
        One verdict per culprit and episode, in order of detection. An episode that is over has `until_step` in its
        evidence; a rank that becomes slow again later gets another verdict.

    Raises:
        UsageError: The arrays are not two-dimensional or do not fit together.
    """
    own, work = _table(own_seconds), None if samples is None else _table(samples)
    if work is not None and work.shape != own.shape:
        raise UsageError(f"own times are {own.shape} and samples {work.shape}; both are [steps, ranks]")
    if own.shape[1] < 2:
        return []
    detector = Detector(own.shape[1])
    found: dict[tuple[int, int], Verdict] = {}
    for step, row in enumerate(own):
        for finding in detector.update(row, None if work is None else work[step]):
            found[finding.verdict.ranks[0], finding.verdict.detected_step] = finding.verdict
    verdicts = []
    for verdict in found.values():
        # On line an episode is judged on its first steps; here on all of them.
        begin, until = verdict.since_step, verdict.evidence.get("until_step")
        episode = slice(begin, None if until is None else max(int(until), begin + 1))
        verdicts.append(rejudge(verdict, own[episode], None if work is None else work[episode]))
    return verdicts


def rejudge(verdict: Verdict, own: Floats, samples: Floats | None) -> Verdict:
    """Return a detector's verdict judged again on all steps of its episode.

    Args:
        verdict: What `Detector.update` found.
        own: Own times in seconds over the episode, float [steps, ranks].
        samples: Samples over the episode, [steps, ranks], or None.
    """
    if is_of_pauses(verdict):
        return rejudge_pauses(verdict, own)
    again = judge_excess(
        verdict.ranks[0],
        own,
        None if samples is None or not np.isfinite(samples).any() else samples,
        since_step=verdict.since_step,
        detected_step=verdict.detected_step,
        usual=float(np.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))),
    )
    return msgspec.structs.replace(again, evidence={**verdict.evidence, **again.evidence})


def _table(values: ArrayLike) -> Floats:
    table = usable(values)
    if table.ndim != 2:
        raise UsageError(f"an array [steps, ranks] is needed; got one of shape {table.shape}")
    return table

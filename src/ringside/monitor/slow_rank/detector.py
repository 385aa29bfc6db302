"""Find the rank that holds a job up: from own times to verdicts, over a whole run or one step at a time.

The method and what it reaches (recall, delay, false alarms per day) are in docs/design/0002-detector.md.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.errors import UsageError
from ringside.monitor.price import Meter, cost_rank_seconds
from ringside.monitor.slow_rank.pauses import PauseMeter, Pauses, is_of_pauses, judge_pauses, rejudge_pauses
from ringside.monitor.slow_rank.window_test import DELAY, EFFECT, PER_SAMPLE, REST, STREAMS, WHOLE, WindowTest
from ringside.monitor.stats import SMALLEST, Floats, known_median, log_excess, others_median, usable
from ringside.monitor.undecided import SLOWEST, SUSPECTED, Suspect, Undecided
from ringside.monitor.verdict import Evidence, Verdict, VerdictEvent, episode_end

WINDOW = 128
"""Steps the on-line detector keeps as evidence."""

MOST_WITH_PARTS = 128
"""More ranks are judged by whole own times alone: streams of 1,024 would take 8 ms a step and 0.3 GB of rank 0, and
among so many the noise of one is known well."""

LEAST_SHARE = 0.1
"""No rank is taken to need less than this share of what the others need."""


class Detector:
    """Watches one job, step by step; memory is O(ranks) and does not grow with steps.

    Args:
        ranks: Number of ranks, at least 1 (one rank alone never holds up others).
        has_parts: Whether phases and the time per sample are tested as well, where `update` is given them.

    Raises:
        UsageError: There are no ranks.
    """

    def __init__(self, ranks: int, *, has_parts: bool = False) -> None:
        if ranks < 1:
            raise UsageError(f"a job has at least one rank; got {ranks}")
        self.ranks = ranks
        self._has_parts = has_parts and ranks <= MOST_WITH_PARTS
        self._screen = WindowTest(STREAMS if self._has_parts else 1, ranks)
        self._pauses = Pauses(ranks)
        self._open: dict[int, Verdict] = {}
        self._slow = np.zeros(ranks, dtype=bool)
        self._own, self._samples, self._routed = self._kept = np.full((3, WINDOW, ranks), np.nan)
        self._steps = np.zeros(WINDOW, dtype=np.int64)

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, in order of detection."""
        return list(self._open.values())

    def update(
        self,
        own: ArrayLike,
        samples: ArrayLike | None = None,
        *,
        step: int | None = None,
        routed: ArrayLike | None = None,
        parts: ArrayLike | None = None,
        run_delay: ArrayLike | None = None,
    ) -> list[VerdictEvent]:
        """Take in one training step.

        Args:
            own: Own times in seconds, float [ranks]; whatever is not positive and finite counts as missing.
            samples: Samples (or tokens) each rank worked on, [ranks]; 0 or None where not known.
            step: Number of the training step; by default they are counted from 0.
            routed: Bytes of the tokens that were sent to each rank's experts, [ranks]; likewise.
            parts: Seconds of the own time that were spent in each of `PARTS`, float [parts, ranks]; NaN = missing.
            run_delay: Seconds of it in which the training thread was ready to run and had no CPU, [ranks].

        Returns:
            The episodes that began or ended at this step; mostly none.
        """
        row = np.asarray(own, dtype=np.float64)
        if row.shape != (self.ranks,):
            raise UsageError(f"own times of {self.ranks} ranks are needed; got an array of shape {row.shape}")
        slot = self._screen.steps % WINDOW
        self._own[slot] = row
        self._samples[slot] = np.nan if samples is None else samples
        self._routed[slot] = np.nan if routed is None else routed
        row, work, _ = self._kept[:, slot] = usable(self._kept[:, slot])
        self._steps[slot] = self._screen.steps if step is None else step
        excess = excess_of_streams(row, work, parts, run_delay) if self._has_parts else log_excess(row)
        starting, _ = self._screen.update(excess)
        was_slow, self._slow = self._slow, np.logical_or.reduce(self._screen.open)
        pausing, paused = self._pauses.update(row, self._slow)
        if not ((was_slow != self._slow) | pausing | paused).any():
            return []
        opened, closed = self._slow & ~was_slow, was_slow & ~self._slow
        now = int(self._steps[slot])
        events = []
        # Of a rank that is slow in every step pauses are no verdict.
        for rank in map(int, np.flatnonzero(paused | (opened & self._pauses.open))):
            events.append(self._end(rank, self._pauses.last[rank]))
            self._pauses.reset(rank)
        for rank in map(int, np.flatnonzero(closed)):
            # No stream is judged by windows that hold something of an episode in another.
            self._screen.relief[:, rank] = self._screen.relief[:, rank].max()
            events.append(self._end(rank, int(self._screen.relief[0, rank])))
        for rank in map(int, np.flatnonzero(opened)):
            self._open[rank] = self._judge_episode(rank, now, starting[:, rank])
            events.append(VerdictEvent(self._open[rank], ended=False))
        for rank in map(int, np.flatnonzero(pausing)):
            rhythm = self._pauses.rhythm[rank]
            since = self._number(rhythm.first - 1)
            self._open[rank] = judge_pauses(rank, rhythm, self.ranks, since_step=since, detected_step=now)
            events.append(VerdictEvent(self._open[rank], ended=False))
        return events

    def undecided(self) -> Undecided:
        """Return whom it suspects, and what it would have found by now."""
        newest = int(self._steps[(self._screen.steps - 1) % WINDOW])
        return Undecided(step=newest, suspects=self._suspects(), found=self._would_find())

    def _suspects(self) -> list[Suspect]:
        """Return the ranks that may be slow, the likeliest first."""
        screen = self._screen
        shares, lengths = screen.nearest()
        likeliest: dict[int, Suspect] = {}
        for stream, rank in np.argwhere((shares >= SLOWEST) & ~screen.open.any(axis=0)).tolist():
            share, length = float(shares[stream, rank]), int(lengths[stream, rank])
            height = screen.height(stream, rank, length)
            if height < EFFECT / 2 or (stream != WHOLE and not screen.is_borne(stream, rank, length, height)):
                continue
            if rank not in likeliest or share > likeliest[rank].bar_ratio:
                chance = NormalDist().cdf(-share * screen.z) * shares.size
                likeliest[rank] = Suspect(
                    rank=rank,
                    since_step=self._number(screen.steps - length),
                    excess_ratio=math.expm1(height),
                    bar_ratio=share,
                    healthy_steps=round(1.0 / chance) if chance > SMALLEST else 0,
                )
        return sorted(likeliest.values(), key=lambda suspect: -suspect.bar_ratio)

    def _would_find(self) -> dict[int, float]:
        """Return the excess ratio of any rank that would have been named by now, by the steps within which."""
        # What takes longer in all phases shows in the whole, or without the waits for a CPU. The loudest rank counts.
        whole = [WHOLE, REST] if self._has_parts else [WHOLE]
        least = {length: float(np.expm1(of[whole].min(axis=0).max())) for length, of in self._screen.least().items()}
        return {length: ratio for length, ratio in least.items() if math.isfinite(ratio)}

    def _end(self, rank: int, count: int) -> VerdictEvent:
        """Close a rank's episode, which was over after step count `count`."""
        return episode_end(self._open.pop(rank), self._number(count))

    def _judge_episode(self, rank: int, now: int, starting: NDArray[np.bool_]) -> Verdict:
        """Return the verdict on an episode that has just opened, from its steps as far back as the window reaches."""
        # Parts are steadier than the whole: where one stands out clearest, that tells when it began.
        clearest = int(np.argmax(np.where(starting, self._screen.contrast[:, rank], -np.inf)))
        onset, total = int(self._screen.onset[clearest, rank]), self._screen.steps
        usual = float(self._screen.usual[WHOLE, rank])
        excess = None
        if not starting[WHOLE]:
            # What stands out, and what nearly does, adds up; the phases are the same time as delay and rest.
            near = starting | (self._screen.nearest()[0][:, rank] >= SUSPECTED)
            length = total - onset
            more = [math.expm1(self._screen.height(s, rank, length)) if near[s] else 0.0 for s in range(STREAMS)]
            whole = max(more[DELAY] + more[REST], sum(more[1:DELAY]))
            excess = math.log1p(whole or more[PER_SAMPLE]) + usual
        slots = np.arange(max(onset, total - WINDOW, 0), total) % WINDOW
        return judge_excess(
            rank,
            self._own[slots],
            None if list(np.flatnonzero(starting)) == [PER_SAMPLE] else self._samples[slots],  # they are taken off
            self._routed[slots],
            since_step=self._number(onset) if onset else int(self._steps[slots[0]]),
            detected_step=now,
            usual=usual if onset > 0 else 0.0,  # there was no before
            excess=excess,
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


def _table(values: ArrayLike) -> Floats:
    table = usable(values)
    if table.ndim != 2:
        raise UsageError(f"an array [steps, ranks] is needed; got one of shape {table.shape}")
    return table


def excess_of_streams(own: Floats, samples: Floats, parts: ArrayLike | None, run_delay: ArrayLike | None) -> Floats:
    """Return the log excess of what is tested, [streams, ranks]; NaN where it is missing.

    All but the last is how much more seconds a rank spends than the others do, in shares of their own time.

    Args:
        own: Own times in seconds, [ranks].
        samples: Samples per rank, likewise.
        parts: Seconds of the own time in each of `PARTS`, [parts, ranks].
        run_delay: Seconds of it in which the training thread was ready to run and had no CPU, [ranks].
    """
    streams = np.full((STREAMS, len(own)), np.nan)
    streams[WHOLE] = rest = own
    if parts is not None:
        streams[1:DELAY] = parts
    if run_delay is not None:
        streams[DELAY] = np.minimum(np.asarray(run_delay, dtype=np.float64), (1.0 - LEAST_SHARE) * own)
        streams[REST] = own - streams[DELAY]
        rest = np.where(np.isnan(streams[REST]), own, streams[REST])
    with np.errstate(invalid="ignore", divide="ignore"):
        streams[PER_SAMPLE] = np.log(usable(rest / samples))
        others = others_median(streams)
        streams -= others
        more = streams[:PER_SAMPLE] / others[WHOLE]
        streams[:PER_SAMPLE] = np.log(np.maximum(1.0 + more, LEAST_SHARE))
    return streams


# -------------------------------------------------------------------------------------------------
# From an episode of one rank to a verdict: slow hardware or more work, in numbers, and its price.

EXPLAINED = 0.7
"""Uneven work is the verdict when sample counts account for this much of the excess."""

SLOW_CAUSE = "its own work takes longer than the same work elsewhere"
SLOW_ADVICE = (
    "Compare this rank's clocks, temperature, CPU steal and neighbours with a healthy rank's; "
    "move the rank to another device or host if they do not explain it."
)
UNEVEN_CAUSE = "it was given more samples per step; per sample it is as fast as the others"
UNEVEN_ADVICE = "Balance the batches: equal samples (or tokens) per rank, or bucket sequences by length."
ROUTED_CAUSE = "more tokens are sent to its experts; per token it is as fast as the others"
ROUTED_ADVICE = "Balance the experts: a load-balancing loss or a capacity per expert, or other experts on this rank."


def judge_excess(
    rank: int,
    own: Floats,
    samples: Floats | None,
    routed: Floats | None = None,
    *,
    since_step: int,
    detected_step: int,
    usual: float = 0.0,
    excess: float | None = None,
) -> Verdict:
    """Return the verdict on one rank's episode.

    Args:
        rank: The culprit.
        own: Own times in seconds over the episode so far, float [steps, ranks]; NaN = missing.
        samples: Samples (or tokens) per step and rank, float [steps, ranks]; NaN or None where not known.
        routed: Bytes of the tokens that were sent to experts, likewise.
        since_step: Training step at which the episode began.
        detected_step: Training step at which it was noticed.
        usual: The rank's log excess before the episode.
        excess: Its log excess now, where that is known better than from whole own times.
    """
    if excess is None:
        excess = known_median(log_excess(own)[:, rank])
    more_samples, more_routed = (
        0.0 if work is None else known_median(log_excess(work)[:, rank]) for work in (samples, routed)
    )
    more_work = max(more_samples, more_routed)
    uneven = more_work > 0 and (excess - more_work < min(EFFECT, excess / 2) or more_work >= EXPLAINED * excess)
    evidence: Evidence = {
        "own_seconds": known_median(own[:, rank]),
        "others_own_seconds": known_median(np.delete(own, rank, axis=1).ravel()),
        "usual_excess_ratio": math.expm1(usual),
        "steps": len(own),
    }
    if samples is not None and np.isfinite(samples).any():
        evidence["more_samples_ratio"] = math.expm1(more_samples)
    if routed is not None and (routed > 0).any():
        evidence["more_routed_ratio"] = math.expm1(more_routed)
    cause, advice = SLOW_CAUSE, SLOW_ADVICE
    if uneven:
        by_samples = more_samples >= more_routed
        cause, advice = (UNEVEN_CAUSE, UNEVEN_ADVICE) if by_samples else (ROUTED_CAUSE, ROUTED_ADVICE)
    return Verdict(
        kind="uneven_work" if uneven else "slow_rank",
        ranks=[rank],
        since_step=since_step,
        detected_step=detected_step,
        excess_ratio=math.expm1(excess),
        cause=cause,
        evidence=evidence,
        cost_rank_seconds=cost_rank_seconds(own, [rank], [usual]),
        advice=advice,
    )


def rejudge(verdict: Verdict, own: Floats, samples: Floats | None, routed: Floats | None = None) -> Verdict:
    """Return a detector's verdict judged again on all steps of its episode.

    Args:
        verdict: What `Detector.update` found.
        own: Own times in seconds over the episode, float [steps, ranks].
        samples: Samples over the episode, [steps, ranks], or None.
        routed: Bytes sent to experts over it, likewise.
    """
    if is_of_pauses(verdict):
        return rejudge_pauses(verdict, own)
    again = judge_excess(
        verdict.ranks[0],
        own,
        samples,
        routed,
        since_step=verdict.since_step,
        detected_step=verdict.detected_step,
        usual=float(np.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))),
    )
    return msgspec.structs.replace(again, evidence={**verdict.evidence, **again.evidence})


PriceMeter = Meter | PauseMeter
"""The price of one open verdict while the run goes on."""


def meter_of(verdict: Verdict) -> PriceMeter:
    """Return a meter that goes on from the price of a verdict on one rank."""
    if is_of_pauses(verdict):
        return PauseMeter(verdict)
    usual = math.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))
    return Meter(verdict.ranks[0], math.log1p(verdict.excess_ratio), usual, verdict.cost_rank_seconds)

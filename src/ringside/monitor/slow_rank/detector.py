"""Find the rank that holds a job up: from own times to verdicts, over a whole run or one step at a time.

The method and what it reaches (recall, delay, false alarms per day) are in docs/design/0002-detector.md.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.errors import UsageError
from ringside.monitor.causes import explain_verdict
from ringside.monitor.price import Meter, cost_rank_seconds
from ringside.monitor.run.records import Row
from ringside.monitor.run.table import tabulate
from ringside.monitor.slow_rank.pauses import PauseMeter, Pauses, is_of_pauses, judge_pauses, rejudge_pauses
from ringside.monitor.slow_rank.window_test import EFFECT, PERSISTENCE, WindowTest
from ringside.monitor.stats import Floats, known_median, log_excess, others_median, usable
from ringside.monitor.undecided import NO_CHANCE, SUSPECTED, Suspect, Undecided
from ringside.monitor.verdict import Verdict, VerdictEvent, episode_end

WINDOW = 128
"""Steps the on-line detector keeps as evidence."""

PARTS = ("data", "forward", "backward", "optimizer")
"""Phases that are judged beside the whole: 12 ms more of a loader are certain long before a noisy own time is."""

STREAMS = 1 + len(PARTS) + 3
"""The whole, its parts, what it was delayed for want of a CPU, the rest without that, and the rest per sample."""
WHOLE, DELAY, REST, PER_SAMPLE = 0, STREAMS - 3, STREAMS - 2, STREAMS - 1

MOST_WITH_PARTS = 128
"""More ranks are judged by whole own times alone: streams of 1,024 would take 8 ms a step and 0.3 GB of rank 0, and
among so many the noise of one is known well."""


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
        has_parts = has_parts and ranks <= MOST_WITH_PARTS
        streams = STREAMS if has_parts else 1
        self._screen = WindowTest(streams, ranks, streams=streams, phases=len(PARTS) if has_parts else None)
        self._pauses = Pauses(1, ranks)
        self._open: dict[int, Verdict] = {}
        self._own, self._samples, self._routed = np.full((3, WINDOW, ranks), np.nan)
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
        row = usable(own)
        if row.shape != (self.ranks,):
            raise UsageError(f"own times of {self.ranks} ranks are needed; got an array of shape {row.shape}")
        slot = self._screen.steps % WINDOW
        self._own[slot] = row
        self._samples[slot] = np.nan if samples is None else usable(samples)
        self._routed[slot] = np.nan if routed is None else usable(routed)
        self._steps[slot] = self._screen.steps if step is None else step
        was_open: NDArray[np.bool_] = np.logical_or.reduce(self._screen.open)
        starting, _ = self._screen.update(self._streams(row, self._samples[slot], parts, run_delay))
        is_open: NDArray[np.bool_] = np.logical_or.reduce(self._screen.open)
        opened, closed = is_open & ~was_open, was_open & ~is_open
        pausing, paused = self._pauses.update(row[None], is_open[None])
        if not (opened.any() or closed.any() or pausing.any() or paused.any()):
            return []
        now = int(self._steps[slot])
        events = []
        # Of a rank that is slow in every step pauses are no verdict.
        for rank in map(int, np.flatnonzero(paused[0] | (opened & self._pauses.open[0]))):
            events.append(self._end(rank, self._pauses.last[0, rank]))
            self._pauses.reset(0, rank)
        for rank in map(int, np.flatnonzero(closed)):
            # No stream is judged by windows that hold something of an episode in another.
            self._screen.relief[:, rank] = self._screen.relief[:, rank].max()
            events.append(self._end(rank, int(self._screen.relief[0, rank])))
        for rank in map(int, np.flatnonzero(opened)):
            self._open[rank] = self._judge_episode(rank, now, starting[:, rank])
            events.append(VerdictEvent(self._open[rank], ended=False))
        for rank in map(int, np.flatnonzero(pausing[0])):
            rhythm = self._pauses.rhythm[0, rank]
            since = self._number(rhythm.first - 1)
            self._open[rank] = judge_pauses(rank, rhythm, self.ranks, since_step=since, detected_step=now)
            events.append(VerdictEvent(self._open[rank], ended=False))
        return events

    def undecided(self) -> Undecided:
        """Return whom it suspects, and what it would have found by now."""
        screen = self._screen
        shares, lengths = screen.nearest()
        likeliest: dict[int, Suspect] = {}
        for stream, rank in np.argwhere((shares >= SUSPECTED) & ~screen.open.any(axis=0)):
            share, length = float(shares[stream, rank]), int(lengths[stream, rank])
            height = screen.height(int(stream), int(rank), length)
            if stream != WHOLE and not screen.is_borne(int(stream), int(rank), length, height):
                continue
            if height >= EFFECT / 2 and (rank not in likeliest or share > likeliest[rank].bar_ratio):
                chance = 0.5 * math.erfc(share * screen.z / math.sqrt(2.0)) * shares.size
                likeliest[rank] = Suspect(
                    rank=int(rank),
                    since_step=self._number(screen.steps - length),
                    excess_ratio=math.expm1(height),
                    bar_ratio=share,
                    healthy_steps=round(1.0 / chance) if chance > NO_CHANCE else 0,
                )
        suspects = sorted(likeliest.values(), key=lambda suspect: -suspect.bar_ratio)
        # What takes longer in all phases shows in the whole, or without the waits for a CPU. The loudest rank counts.
        whole = [WHOLE, REST] if len(screen.open) > 1 else [WHOLE]
        least = {length: float(np.expm1(of[whole].min(axis=0).max())) for length, of in screen.least().items()}
        found = {length: ratio for length, ratio in least.items() if math.isfinite(ratio)}
        newest = int(self._steps[(self._screen.steps - 1) % WINDOW])
        return Undecided(step=newest, suspects=suspects, found=found)

    def _end(self, rank: int, count: int) -> VerdictEvent:
        """Close a rank's episode, which was over after step count `count`."""
        return episode_end(self._open.pop(rank), self._number(count))

    def _streams(self, own: Floats, samples: Floats, parts: ArrayLike | None, run_delay: ArrayLike | None) -> Floats:
        """Return the log excess of what is tested, [streams, ranks]; see `STREAMS`.

        All but the last is how much more seconds a rank spends than the others do, in shares of their own time.
        """
        streams = np.full(self._screen.open.shape, np.nan)
        if len(streams) == 1:
            streams[0] = log_excess(own)
            return streams
        seconds = np.full((STREAMS - 1, self.ranks), np.nan)
        seconds[WHOLE] = own
        if parts is not None:
            seconds[1:DELAY] = parts
        if run_delay is not None:
            seconds[DELAY] = np.minimum(np.asarray(run_delay, dtype=np.float64), 0.95 * own)
            seconds[REST] = own - seconds[DELAY]
        with np.errstate(invalid="ignore", divide="ignore"):
            share = (seconds - others_median(seconds)) / others_median(own)
        streams[:PER_SAMPLE] = np.log1p(np.maximum(share, -0.9))
        streams[PER_SAMPLE] = log_excess(np.where(np.isnan(seconds[REST]), own, seconds[REST]) / samples)
        return streams

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


def _table(values: ArrayLike) -> Floats:
    table = usable(values)
    if table.ndim != 2:
        raise UsageError(f"an array [steps, ranks] is needed; got one of shape {table.shape}")
    return table


# -------------------------------------------------------------------------------------------------
# From an episode of one rank to a verdict: slow hardware or more work, with the numbers that say so, and its price.

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
    evidence: dict[str, float | int | str] = {
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


PriceMeter = Meter | PauseMeter
"""The price of one open verdict while the run goes on."""


def meter_of(verdict: Verdict) -> PriceMeter:
    """Return a meter that goes on from the price of a verdict on one rank."""
    if is_of_pauses(verdict):
        return PauseMeter(verdict)
    usual = math.log1p(float(verdict.evidence.get("usual_excess_ratio", 0.0)))
    return Meter(verdict.ranks[0], math.log1p(verdict.excess_ratio), usual, verdict.cost_rank_seconds)


# -------------------------------------------------------------------------------------------------
# What watches a job that goes on: the detector, with causes and prices.

RECORDS_KEPT = 16_384

MATERIAL = 0.02
"""The share of a job's step that a rank's excess must take up. Less holds nobody up: where a link is slow and steps
take ten times as long, the rank that sends over it may well need a millisecond more for its own work."""

LASTED_S, LOST_S = 0.3, 0.05
"""Seconds that an excess must have lasted, and must have added up to, and it must still be there. Now and then a
virtual machine's processor is another's for a fifth of a second, and two ranks on cores that share a physical one lag
by turns, by a tenth for a dozen steps: that is much where steps take milliseconds, and nobody can do anything about."""

LOOK_AGAIN = 8
"""Steps between two looks at who is slow and does not matter yet."""


class SlowRankWatcher:
    """Names ranks whose own time holds the job up: `slow_rank`, `uneven_work`, `input_bound`.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._detector = Detector(ranks, has_parts=True)
        self._recent: deque[Row] = deque(maxlen=max(32, min(WINDOW, RECORDS_KEPT // ranks)))
        self._meters: dict[int, PriceMeter] = {}
        # By rank. A finding of the detector is pending until it has lasted, then minor until it is material, then open.
        self._pending: dict[int, Verdict] = {}
        self._minor: dict[int, Verdict] = {}
        self._open: dict[int, Verdict] = {}

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Watcher`."""
        self._recent.append(row)
        own, (samples, routed) = np.full(self._ranks, np.nan), np.zeros((2, self._ranks))
        parts, run_delay = np.full((len(PARTS), self._ranks), np.nan), np.full(self._ranks, np.nan)
        for rank, record in row.items():
            own[rank], samples[rank], routed[rank] = record.own_seconds, record.samples, record.routed_bytes
            forward = record.forward_seconds + record.compute_seconds  # what is not told apart stands in the second
            parts[:, rank] = record.data_seconds, forward, record.backward_seconds, record.optimizer_seconds
            if record.run_delay_seconds is not None:
                run_delay[rank] = record.run_delay_seconds
        findings = self._detector.update(
            own,
            samples if samples.any() else None,
            step=step,
            routed=routed if routed.any() else None,
            parts=parts,
            run_delay=run_delay,
        )
        for meter in self._meters.values():
            meter.add(own[None])
        events = []
        for finding in findings:
            rank = finding.verdict.ranks[0]
            if not finding.ended:
                self._pending[rank] = finding.verdict
            elif rank in self._open:
                verdict = self._priced(rank, self._open.pop(rank))
                del self._meters[rank]
                events.append(episode_end(verdict, int(finding.verdict.evidence["until_step"])))
            else:  # over before it was a verdict
                self._pending.pop(rank, None)
                self._minor.pop(rank, None)
        lasted = [rank for rank, verdict in self._pending.items() if self._has_lasted(verdict)]
        self._minor.update({rank: self._pending.pop(rank) for rank in lasted})
        for rank in lasted if step % LOOK_AGAIN else list(self._minor):
            if self._is_material(self._minor[rank]):
                verdict = msgspec.structs.replace(self._minor.pop(rank), detected_step=step)
                table = tabulate((record for row in self._recent for record in row.values()), self._ranks)
                since = verdict.since_step
                verdict = explain_verdict(verdict, table.between(since), table.before(since))
                self._meters[rank] = meter_of(verdict)
                self._open[rank] = verdict
                events.append(VerdictEvent(verdict, ended=False))
        return events

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""
        return [self._priced(rank, verdict) for rank, verdict in self._open.items()]

    def undecided(self) -> Undecided:
        """Return who may be slow: by the detector, or by it for sure but too briefly or by too little to be told."""
        state = self._detector.undecided()
        open_cases = [(self._pending, "it has not lasted"), (self._minor, "it takes up too little of a step")]
        held = [
            Suspect(
                rank=rank,
                since_step=verdict.since_step,
                excess_ratio=verdict.excess_ratio,
                bar_ratio=1.0,
                healthy_steps=0,
                why=why,
            )
            for cases, why in open_cases
            for rank, verdict in cases.items()
        ]
        return msgspec.structs.replace(state, suspects=[*held, *state.suspects])

    def _has_lasted(self, verdict: Verdict) -> bool:
        """Return whether a rank's excess has lasted and cost enough, and is there in most of the newest steps."""
        if is_of_pauses(verdict):
            return True
        rank, seconds, lost = verdict.ranks[0], 0.0, 0.0
        late: list[bool] = []
        for row in filter(None, reversed(self._recent)):
            if next(iter(row.values())).step < verdict.since_step:
                break
            times = [time for record in row.values() for time in (record.step_seconds, record.own_seconds)]
            seconds += max((time for time in times if time > 0), default=0.0)  # what is not known is not positive
            known = {other: record.own_seconds for other, record in row.items() if record.own_seconds > 0}
            own = known.pop(rank, None)
            if own is not None:
                own -= row[rank].unclear_seconds  # of what was not seen, what is kinder to the accused
            if own is None or not known:
                continue
            usual = median(known.values())
            lost += own - usual
            late.append(own >= (1.0 + verdict.excess_ratio / 2.0) * usual)
        else:
            seconds, lost = LASTED_S, LOST_S  # longer than is remembered
        newest = late[:PERSISTENCE]
        return seconds >= LASTED_S and lost >= LOST_S and 2 * sum(newest) >= len(newest)

    def _is_material(self, verdict: Verdict) -> bool:
        """Return whether what the rank needs beyond the others is a good part of the newest steps."""
        rows = list(self._recent)[-PERSISTENCE:]
        steps = [record.step_seconds for row in rows for record in row.values() if record.step_seconds > 0]
        usual = float(verdict.evidence.get("others_own_seconds", verdict.evidence["own_seconds"]))
        return not steps or usual * verdict.excess_ratio >= MATERIAL * float(np.median(steps))

    def _priced(self, rank: int, verdict: Verdict) -> Verdict:
        return msgspec.structs.replace(verdict, cost_rank_seconds=self._meters[rank].rank_seconds)

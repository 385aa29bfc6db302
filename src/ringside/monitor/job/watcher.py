"""Verdicts on a whole job: bound by communication, by its input, or by too many small collectives.

All are shares of the step that *no* rank is spared: a rank that is blocked longer than the one that waits least waits
for a rank, not for the network, and that is another verdict. The bars are in docs/questions.md.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from ringside.monitor.job.collectives import best_buckets, bucket_mb
from ringside.monitor.run.records import Row
from ringside.monitor.run.table import StepTable, least_of_ranks
from ringside.monitor.stats import Floats
from ringside.monitor.verdict import Evidence, Verdict, VerdictEvent, episode_end
from ringside.text import duration, percent, size

BOUND_AT, BOUND_UNTIL = 0.5, 0.4
"""A job is bound by communication while it is exposed for this share of the step on every rank."""
INPUT_AT, INPUT_UNTIL = 0.3, 0.2
"""A job is bound by its input while every rank spends this share of its step before forward begins."""
SAVED_AT, SAVED_UNTIL = 0.05, 0.03
"""Collectives are too small while larger buckets would save this share of the step ..."""
SAVED_OF_SYNC = 0.25
"""... and this share of the synchronisation, and there are ..."""
MANY = 10
"""... more collectives than this in a step."""
EVERY = 4
"""Steps between two checks of that."""
LASTING_S = 5.0
"""For how long it must be so."""

BOUND_ADVICE = (
    "Send fewer bytes (gradients in bfloat16, a compression hook) or send them less often (more samples per step, "
    "accumulation under no_sync()); ringside probe shows whether the network is as fast as it should be."
)
INPUT_ADVICE = (
    "Give every data loader more workers and prefetching (num_workers, prefetch_factor, persistent_workers), or move "
    "decoding and storage nearer: no rank is faster than its input."
)


class JobStep(NamedTuple):
    """One step of a job; seconds, and of what varies between ranks the least of them.

    Args:
        step: The training step.
        step_seconds: Its duration.
        exposed_seconds: Blocked in synchronisation, on the rank that was blocked least.
        data_seconds: From the previous step's end until forward, on the rank that needed least.
        busy_seconds: What collectives took one after the other, where that was shortest.
        latency_seconds: What a collective takes apart from its bytes, where that was least; 0: not known.
        payload_bytes: Bytes synchronised.
        collectives: By how many collectives.
    """

    step: int
    step_seconds: float
    exposed_seconds: float
    data_seconds: float
    busy_seconds: float
    latency_seconds: float
    payload_bytes: float
    collectives: float


def job_step(step: int, row: Row) -> JobStep:
    """Return the job's figures of one step."""
    records = list(row.values())
    first = row[min(row)]  # in synchronous training they agree on the rest
    return JobStep(
        step=step,
        step_seconds=first.step_seconds if 0 <= first.step_seconds < math.inf else 0.0,
        exposed_seconds=_least(record.exposed_seconds for record in records),
        data_seconds=_least(record.data_seconds for record in records),
        busy_seconds=_least(record.busy_seconds for record in records if record.busy_seconds > 0),
        latency_seconds=_least(record.latency_seconds for record in records if record.latency_seconds > 0),
        payload_bytes=float(first.payload_bytes),
        collectives=float(first.collectives),
    )


def bucket_saving(step: JobStep) -> tuple[float, float]:
    """Return what larger buckets would save of this step, seconds, and which share of the synchronisation that is."""
    best = best_buckets(step.collectives, step.payload_bytes, step.busy_seconds, step.latency_seconds)
    return min(best.saved_seconds, step.exposed_seconds), best.saved_ratio


class Rule(ABC):
    """One kind of verdict on a whole job.

    Args:
        lasting_s: For how long it must be so, seconds.

    Attributes:
        kind: The verdict's.
        bars: The share of the step at which an episode begins, and the one below which it ends.
        episode: Whether it is so.
    """

    kind: str
    bars: tuple[float, float]

    def __init__(self, lasting_s: float = LASTING_S) -> None:
        self.episode = Episode(*self.bars, lasting_s)

    @abstractmethod
    def share(self, step: JobStep) -> float:
        """Return which share of the step would be saved; 0 where the rule does not hold."""

    @abstractmethod
    def judge(self, typical: JobStep) -> tuple[float, str, Evidence, str]:
        """Return a verdict's excess ratio, cause, evidence and advice, from the median step of the episode."""


class CommunicationBound(Rule):
    """The whole job waits for gradients that have nothing left to hide behind.

    Args:
        explained: Whether something narrower is known to be the reason.
        lasting_s: For how long it must be so, seconds.
    """

    kind, bars = "communication_bound", (BOUND_AT, BOUND_UNTIL)

    def __init__(self, explained: Callable[[], bool] = bool, lasting_s: float = LASTING_S) -> None:
        super().__init__(lasting_s)
        self._explained = explained

    def share(self, step: JobStep) -> float:
        """Return exposed synchronisation over step; 0 while something narrower explains it and no verdict is open."""
        if not self.episode.is_open and self._explained():
            self.episode.reset()
            return 0.0
        return _ratio(step.exposed_seconds, step.step_seconds)

    def judge(self, typical: JobStep) -> tuple[float, str, Evidence, str]:
        """Return the verdict's parts; see `Rule`."""
        exposed, step = typical.exposed_seconds, typical.step_seconds
        advice = BOUND_ADVICE
        if typical.collectives > MANY and not typical.busy_seconds:  # no `small_collectives` without their times
            advice += (
                f" {typical.collectives:.0f} collectives carry the bytes, and how long each takes was not measured: if "
                "they are small, try a larger bucket_cap_mb."
            )
        return (
            _ratio(exposed, step - exposed),
            f"communication is exposed for {duration(exposed)} of each step of {duration(step)}, also on the rank "
            "that arrives last",
            {
                "exposed_seconds": exposed,
                "step_seconds": step,
                "exposed_ratio": _ratio(exposed, step),
                "payload_bytes": typical.payload_bytes,
            },
            advice,
        )


class InputBound(Rule):
    """The whole job waits for its data loaders."""

    kind, bars = "input_bound", (INPUT_AT, INPUT_UNTIL)

    def share(self, step: JobStep) -> float:
        """Return time before forward over step."""
        return _ratio(step.data_seconds, step.step_seconds)

    def judge(self, typical: JobStep) -> tuple[float, str, Evidence, str]:
        """Return the verdict's parts; see `Rule`."""
        data, step = typical.data_seconds, typical.step_seconds
        return (
            _ratio(data, step - data),
            f"until forward begins every rank needs {duration(data)} of each step of {duration(step)}: "
            "fetching its input",
            {"data_seconds": data, "step_seconds": step, "data_ratio": _ratio(data, step)},
            INPUT_ADVICE,
        )


class SmallCollectives(Rule):
    """Most of the synchronisation is the latency of collectives that are too small."""

    kind, bars = "small_collectives", (SAVED_AT, SAVED_UNTIL)

    def __init__(self, lasting_s: float = LASTING_S) -> None:
        super().__init__(lasting_s)
        self._recent: deque[JobStep] = deque(maxlen=WINDOW_STEPS)
        self._seen, self._share = 0, 0.0

    @property
    def suspects(self) -> bool:
        """Whether collectives are too small, or may turn out to be."""
        return self.episode.is_open or self.episode.is_high

    def share(self, step: JobStep) -> float:
        """Return what larger buckets would save over step, of the median of the last steps: single ones vary much."""
        self._recent.append(step)
        if self._seen % EVERY == 0:
            typical = median_step(self._recent)
            saved, of_sync = bucket_saving(typical)
            # An open episode ends at a lower bar than it began, by both measures.
            least = SAVED_OF_SYNC * (SAVED_UNTIL / SAVED_AT if self.episode.is_open else 1.0)
            holds = typical.collectives > MANY and not of_sync < least
            self._share = _ratio(saved, typical.step_seconds) if holds else 0.0
        self._seen += 1
        return self._share

    def judge(self, typical: JobStep) -> tuple[float, str, Evidence, str]:
        """Return the verdict's parts; see `Rule`."""
        count, bytes_each = typical.collectives, typical.payload_bytes / max(typical.collectives, 1.0)
        best = best_buckets(count, typical.payload_bytes, typical.busy_seconds, typical.latency_seconds)
        saved, _ = bucket_saving(typical)
        return (
            _ratio(saved, typical.step_seconds - saved),
            f"{count:.0f} collectives of {size(bytes_each)} per step "
            f"take {duration(typical.latency_seconds)} each before a byte moves: {percent(best.saved_ratio)} of the "
            f"synchronisation",
            {
                "collectives_per_step": count,
                "bytes_each": bytes_each,
                "latency_seconds": typical.latency_seconds,
                "saved_seconds_per_step": saved,
                "saved_ratio": best.saved_ratio,
                "bucket_mb": bucket_mb(best.bucket_bytes),
            },
            f"DistributedDataParallel(..., bucket_cap_mb={bucket_mb(best.bucket_bytes)}) makes {best.collectives} of "
            f"them per step and saves about {duration(saved)} of each; with gradient accumulation, no_sync() saves "
            "whole passes.",
        )


class JobWatcher:
    """Judges what holds up a whole job.

    Args:
        ranks: Number of ranks.
        rules: The kinds of verdicts, narrower ones first.
    """

    def __init__(self, ranks: int, rules: Iterable[Rule]) -> None:
        self._ranks = ranks
        self._rules = list(rules)
        self._recent: deque[JobStep] = deque(maxlen=WINDOW_STEPS)
        self._open: dict[str, Verdict] = {}

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Watcher`.

        Where a rank's record is missing it is not known what every rank is spared: it may be the one all others wait
        for.
        """
        if len(row) < self._ranks:
            return []
        current = job_step(step, row)
        self._recent.append(current)
        events = []
        for rule in self._rules:
            if (verdict := self._open.get(rule.kind)) is not None:
                self._open[rule.kind] = add_cost(verdict, current, self._ranks)
            if not rule.episode.update(step, rule.share(current), current.step_seconds):
                continue
            if rule.episode.is_open:
                since = rule.episode.since_step
                episode = [kept for kept in self._recent if kept.step >= since]
                excess, cause, evidence, advice = rule.judge(median_step(episode))
                verdict = Verdict(
                    kind=rule.kind,
                    ranks=[],
                    since_step=since,
                    detected_step=step,
                    excess_ratio=excess,
                    cause=cause,
                    evidence=evidence,
                    advice=advice,
                )
                self._open[rule.kind] = with_cost(verdict, episode, self._ranks)
                events.append(VerdictEvent(self._open[rule.kind], ended=False))
            else:
                events.append(episode_end(self._open.pop(rule.kind), rule.episode.until_step))
        return events

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""
        return list(self._open.values())


def lost_seconds(verdict: Verdict, exposed: Floats, data: Floats) -> Floats:
    """Return what steps lost, on every rank, to a verdict on a whole job or on a link, seconds, float64 [steps].

    What would be saved is replayed: all of the exposed communication or of the input, what larger buckets would save,
    or what is exposed beyond what was before the link became slow.

    Args:
        verdict: The verdict.
        exposed: Blocked in synchronisation, on the rank that was blocked least, seconds, [steps].
        data: From the previous step's end until forward, on the rank that needed least, seconds, [steps].
    """
    if verdict.kind == "input_bound":
        return data
    if verdict.kind == "small_collectives":
        return np.minimum(exposed, float(verdict.evidence.get("saved_seconds_per_step", 0.0)))
    if verdict.kind == "slow_link":
        return np.maximum(exposed - float(verdict.evidence.get("usual_exposed_seconds", 0.0)), 0.0)
    return exposed


def add_cost(verdict: Verdict, step: JobStep, ranks: int) -> Verdict:
    """Return the verdict with what this step lost to it added to its price."""
    return msgspec.structs.replace(verdict, cost_rank_seconds=verdict.cost_rank_seconds + _cost(verdict, [step], ranks))


def with_cost(verdict: Verdict, kept: Sequence[JobStep], ranks: int) -> Verdict:
    """Return the verdict with what its episode cost until it was detected, from the steps of it that are remembered."""
    steps = verdict.detected_step - verdict.since_step + 1
    cost = _cost(verdict, kept, ranks) * steps / max(len(kept), 1)
    return msgspec.structs.replace(verdict, cost_rank_seconds=cost)


def reprice(verdict: Verdict, episode: StepTable) -> Verdict:
    """Return a verdict on a whole job or on a link with its price over all records of its episode."""
    exposed, data = (least_of_ranks(episode[name]) for name in ("exposed_seconds", "data_seconds"))
    lost = lost_seconds(verdict, np.nan_to_num(exposed), np.nan_to_num(data))
    return msgspec.structs.replace(verdict, cost_rank_seconds=float(lost.sum()) * episode.ranks * episode.stride)


def _cost(verdict: Verdict, steps: Sequence[JobStep], ranks: int) -> float:
    exposed, data = ([getattr(step, name) for step in steps] for name in ("exposed_seconds", "data_seconds"))
    return ranks * float(lost_seconds(verdict, np.array(exposed), np.array(data)).sum())


def median_step(steps: Iterable[JobStep]) -> JobStep:
    """Return the medians of some steps; of what collectives take, of those steps in which it was known."""
    steps = list(steps)
    if not steps:
        return _NOTHING
    typical = JobStep(steps[-1].step, *(_middle(column) for column in list(zip(*steps, strict=True))[1:]))
    return typical._replace(
        busy_seconds=_middle(step.busy_seconds for step in steps if step.busy_seconds > 0),
        latency_seconds=_middle(step.latency_seconds for step in steps if step.latency_seconds > 0),
    )


_NOTHING = JobStep(-1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _least(values: Iterable[float]) -> float:
    return min((value for value in values if 0 <= value < math.inf), default=0.0)


def _middle(values: Iterable[float]) -> float:
    known = [value for value in values if 0 <= value < math.inf]
    return float(median(known)) if known else 0.0


# -------------------------------------------------------------------------------------------------
# An episode of a job: a share that stays high for long enough begins one, and one that stays low ends it. Pure.

WARM_UP_STEPS = 10
"""First steps of a job, which build buckets and caches: they count for nothing."""

WINDOW_STEPS = 32
"""The median over so many steps is judged: single steps, however long, decide nothing."""

PATIENCE = 2.0
"""Every episode that ends makes the next one need so many times as long: one that stays at the bar has few."""


@dataclass
class Episode:
    """One kind of trouble of a whole job.

    Args:
        begins_at: It begins when the median share is at least this ...
        ends_at: ... and ends when it is below this.
        seconds: For how long the share must be that high (and as many steps as are judged at once).
    """

    begins_at: float
    ends_at: float
    seconds: float
    since_step: int = -1
    is_open: bool = False
    _recent: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _seen: int = 0
    _held: float = 0.0
    _middle: float = 0.0

    @property
    def is_high(self) -> bool:
        """Whether the share is as high as in an episode, for however short a time."""
        return len(self._recent) == WINDOW_STEPS and self._middle >= self.begins_at

    def update(self, step: int, share: float, step_seconds: float) -> bool:
        """Take in a step; return whether the episode began or ended at it (`is_open`: which).

        Args:
            step: The training step.
            share: Its share.
            step_seconds: Its duration.
        """
        self._seen += 1
        if self._seen <= WARM_UP_STEPS:
            return False
        self._recent.append((step, share, step_seconds))
        if len(self._recent) < WINDOW_STEPS:
            return False
        self._middle = middle = median(share for _, share, _ in self._recent)
        if self.is_open:
            self.is_open = middle >= self.ends_at
            if not self.is_open:
                self.seconds, self._held, self.since_step = PATIENCE * self.seconds, 0.0, self._recent[0][0]
            return not self.is_open
        if middle < self.begins_at:
            self._held = 0.0
            return False
        if not self._held:
            # It began with the first high step of those that are judged.
            self.since_step = next(number for number, high, _ in self._recent if high >= self.begins_at)
            earlier = [seconds for number, _, seconds in self._recent if number < self.since_step]
            self._held = sum(seconds for _, _, seconds in self._recent) - sum(earlier)
        else:
            self._held += step_seconds
        self.is_open = self._held >= self.seconds
        return self.is_open

    def reset(self) -> None:
        """Begin anew: what was seen has another reason."""
        self._recent.clear()
        self._held = 0.0

    @property
    def until_step(self) -> int:
        """The first step that was no longer as in the episode, once it has ended."""
        return next((step for step, share, _ in self._recent if share < self.ends_at), 0)

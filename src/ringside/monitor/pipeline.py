"""What is said of a pipeline: a stage that is heavier than the others, and how long ranks wait for their neighbours.

Both are facts of the job's design and blame no rank. A stage is heavier only if all its replicas are, so a slow rank
never makes it so; where a stage is one rank, nothing tells a heavy stage from a slow rank, and nothing is said.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import mean, median, mode

import msgspec
import numpy as np

from ringside.monitor.groups import JobGroups, Mesh
from ringside.monitor.job.watcher import LASTING_S, WINDOW_STEPS, Episode
from ringside.monitor.run.records import Row, StepRecord
from ringside.monitor.run.table import StepTable
from ringside.monitor.slow_rank.window_test import WARM_UP
from ringside.monitor.stats import Floats
from ringside.monitor.verdict import Verdict, VerdictEvent, episode_end
from ringside.text import counted, duration, name_ranks, percent

HEAVIER_AT, HEAVIER_UNTIL = 0.15, 0.10
"""By how much a stage is heavier than the others when an episode begins, and below which it ends."""
EVERY = 8
"""Steps between two looks at the medians of the last ones; the first look is at so many."""

HEAVY_CAUSE = "all its replicas compute longer than the other stages, which wait for it: the model is divided unevenly"
HEAVY_ADVICE = (
    "Move layers from this stage to the others, or give it fewer (the first stage has the embedding, the last one the "
    "head and the loss): that saves at most {} of each step."
)


class StageWatcher:
    """Finds the stage of a pipeline that is heavier than the others in all replicas: `stage_imbalance`.

    Args:
        groups: What is known of how the job's ranks are arranged; where stages change, judging begins anew.
    """

    def __init__(self, groups: JobGroups) -> None:
        self._groups, self._mesh = groups, groups.mesh
        self._begin()

    def _begin(self) -> None:
        self._stages = judged_stages(self._mesh)
        self._episode = Episode(HEAVIER_AT, HEAVIER_UNTIL, LASTING_S)
        self._recent: deque[Floats] = deque(maxlen=WINDOW_STEPS)
        self._seen = 0
        self._heaviest, self._own, self._others, self._excess, self._lost = 0, 0.0, 0.0, 0.0, 0.0
        self._verdict: Verdict | None = None

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Watcher`."""
        events: list[VerdictEvent] = []
        if self._groups.mesh is not self._mesh:
            self._mesh = self._groups.mesh
            if judged_stages(self._mesh) != self._stages:
                events += [episode_end(verdict, step) for verdict in self.open]
                self._begin()
        if not self._stages or len(row) < self._mesh.ranks:
            return events
        records = [row[rank] for rank in range(self._mesh.ranks)]
        self._recent.append(np.array([(record.own_seconds, record.unclear_seconds) for record in records]).T)
        self._seen += 1
        if self._seen % EVERY == 0:
            own, unclear = np.median(np.array(self._recent), axis=0)
            # While an episode is open, it is its stage that is looked at.
            stage = None if self._verdict is None else self._heaviest
            self._heaviest, self._own, self._others = heaviest_stage(own, unclear, self._stages, stage)
            self._excess = self._own / self._others - 1.0 if self._others > 0 else 0.0
            self._lost = most_saved(self._own, self._others, len(self._stages))
        if self._verdict is not None:
            cost = self._verdict.cost_rank_seconds + self._lost * self._mesh.ranks
            self._verdict = msgspec.structs.replace(self._verdict, cost_rank_seconds=cost)
        if self._episode.update(step, self._excess, records[0].step_seconds):
            if self._episode.is_open:
                self._verdict = self._judged(step)
                events.append(VerdictEvent(self._verdict, ended=False))
            elif self._verdict is not None:
                events.append(episode_end(self._verdict, self._episode.until_step))
                self._verdict = None
        return events

    @property
    def open(self) -> list[Verdict]:
        """The verdict whose episode is not over, with its price so far."""
        return [] if self._verdict is None else [self._verdict]

    def _judged(self, step: int) -> Verdict:
        since = self._episode.since_step
        return Verdict(
            kind="stage_imbalance",
            ranks=[],  # nobody's fault
            since_step=since,
            detected_step=step,
            excess_ratio=self._excess,
            cause=HEAVY_CAUSE,
            evidence={
                "stage": self._heaviest,
                "stage_ranks": name_ranks(self._stages[self._heaviest]),
                "stages": len(self._stages),
                "own_seconds": self._own,
                "others_own_seconds": self._others,
                "saved_seconds_per_step": self._lost,
            },
            cost_rank_seconds=self._lost * self._mesh.ranks * (step - since + 1),
            advice=HEAVY_ADVICE.format(duration(self._lost)),
        )


def judged_stages(mesh: Mesh) -> list[list[int]]:
    """Return the stages of a pipeline; none where one is a single rank, which may as well be slow."""
    stages = mesh.stages
    return stages if all(len(ranks) > 1 for ranks in stages) else []


def heaviest_stage(
    own: Floats, unclear: Floats, stages: Sequence[Sequence[int]], which: int | None = None
) -> tuple[int, float, float]:
    """Return which stage is the heaviest, how long it works, and how long the others do in the mean, seconds.

    Args:
        own: Own time of each rank, seconds, [ranks].
        unclear: The part of it in which a rank may have been waiting, [ranks].
        stages: The ranks of each.
        which: The stage to speak of, in place of the heaviest.
    """
    # A stage is as heavy as its fastest rank, its unclear time left out, and the others are as their median rank.
    least = [float(np.min(own[list(ranks)] - unclear[list(ranks)])) for ranks in stages]
    typical = [float(np.median(own[list(ranks)])) for ranks in stages]
    heaviest = max(range(len(stages)), key=least.__getitem__) if which is None else which
    return heaviest, least[heaviest], mean(typical[:heaviest] + typical[heaviest + 1 :])


def most_saved(own: float, others: float, stages: int) -> float:
    """Return what stages of one weight would save of each step at most: the heaviest one's beyond the mean of all."""
    return max(own - others, 0.0) * (stages - 1) / stages


def reprice_stage(verdict: Verdict, episode: StepTable, mesh: Mesh) -> Verdict:
    """Return a verdict on a stage with its price over all records of its episode."""
    stages, stage = judged_stages(mesh), verdict.evidence.get("stage")
    if not isinstance(stage, int) or not 0 <= stage < len(stages) or not len(episode):
        return verdict
    own, unclear = (np.nan_to_num(np.nanmedian(episode[name], axis=0)) for name in ("own_seconds", "unclear_seconds"))
    _, heavy, others = heaviest_stage(own, unclear, stages, stage)
    cost = most_saved(heavy, others, len(stages)) * len(episode) * episode.stride * episode.ranks
    return msgspec.structs.replace(verdict, cost_rank_seconds=cost)


# -------------------------------------------------------------------------------------------------
# Bubbles: how long ranks wait for messages of other stages, beside what the schedule cannot do without.

KEPT = 256
"""Steps of a rank that count: the newest."""
CLEARLY = 0.10
"""Waiting by so much more of the time than the schedule needs is worth a word."""


class Bubbles(msgspec.Struct, frozen=True, kw_only=True):
    """How long the ranks of a pipeline wait for each other; `pipeline` in `summary.json`.

    Args:
        stages: Number of stages.
        waiting_ratio: The share of forward and backward in which a rank waits for messages; the mean of all ranks.
        micro_batches: Of a step; None: the number of messages does not tell.
        chunks: Parts of the model that each rank has; likewise.
        least_ratio: The share that GPipe, 1F1B or interleaved 1F1B would have if all parts took equally long; likewise.
        words: All this in a sentence.
    """

    stages: int
    waiting_ratio: float
    micro_batches: int | None = None
    chunks: int | None = None
    least_ratio: float | None = None
    words: str = ""


class BubbleLedger:
    """Adds up a pipeline's waits while records are read; of the newest steps, so its memory does not grow with them.

    Args:
        mesh: Of the job.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._stages = mesh.stages
        self._stage_of = {rank: stage for stage, ranks in enumerate(self._stages) for rank in ranks}
        self._shares: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._messages: defaultdict[tuple[int, int], deque[int]] = defaultdict(lambda: deque(maxlen=KEPT))

    def reading(self, records: Iterable[StepRecord]) -> Iterator[StepRecord]:
        """Pass records on, and count them."""
        for record in records:
            if self._stages and record.groups and record.step >= WARM_UP:
                self._add(record)
            yield record

    def _add(self, record: StepRecord) -> None:
        own_stage = self._stage_of.get(record.rank)
        if own_stage is None:
            return
        messages: defaultdict[int, int] = defaultdict(int)
        waited = elsewhere = 0.0
        for use in record.groups:
            stage = self._stage_of.get(use.peer)
            if stage is None:
                elsewhere += use.blocked_seconds
            else:
                waited += use.blocked_seconds
                messages[stage] += use.count
        for stage, count in messages.items():
            self._messages[min(own_stage, stage), max(own_stage, stage)].append(count)
        seconds = record.step_seconds - elsewhere - record.optimizer_seconds - record.data_seconds
        if messages and 0.0 <= waited <= seconds and seconds > 0.0:
            self._shares[record.rank].append(waited / seconds)

    def total(self) -> Bubbles | None:
        """Return what it comes to; None: there is no pipeline, or nobody sent messages."""
        if not self._shares:
            return None
        waiting, stages = mean(median(shares) for shares in self._shares.values()), len(self._stages)
        words = f"Pipeline: {percent(waiting)} of forward and backward is waiting for neighbours"
        schedule = schedule_of(stages, {pair: mode(counts) for pair, counts in self._messages.items()})
        if schedule is None:
            return Bubbles(stages=stages, waiting_ratio=waiting, words=f"{words}.")
        micro_batches, chunks = schedule
        # Of GPipe, 1F1B and interleaved 1F1B: Narayanan et al., Efficient Large-Scale Language Model Training on GPU
        # Clusters Using Megatron-LM, section 2.2.
        least = (stages - 1) / (chunks * micro_batches + stages - 1)
        parts = f"{stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        words += f" (least possible with {parts} and {counted(micro_batches, 'micro-batch', 'micro-batches')}: "
        words += f"{percent(least)})"
        if waiting > least + CLEARLY:
            words += "; the rest is stages that take unequally long, messages that take long, or late ranks"
        return Bubbles(
            stages=stages, waiting_ratio=waiting, micro_batches=micro_batches, chunks=chunks, least_ratio=least,
            words=f"{words}.",
        )  # fmt: skip


def schedule_of(stages: int, messages: Mapping[tuple[int, int], int]) -> tuple[int, int] | None:
    """Return the micro-batches of a step and the chunks of each rank; None where messages do not tell.

    Every micro-batch sends one tensor forward and one back over each boundary between parts of the model. Neighbours
    share v boundaries of a model in v chunks per rank, and the last rank and the first share v − 1.

    Args:
        stages: Ranks along the pipeline.
        messages: Sent and received per step and rank, by pair of stages, the lower one first.
    """
    neighbours = [(stage, stage + 1) for stage in range(stages - 1)]
    ends = (0, stages - 1)
    if stages < 2 or not messages.keys() <= {*neighbours, ends}:
        return None
    counts = {messages.get(pair, 0) for pair in neighbours}
    if len(counts) > 1 or (count := counts.pop()) <= 0 or count % 2:
        return None
    if stages == 2:
        # Both kinds of boundaries lie between the same two: 2m(2v − 1) messages, which only v = 1 explains where no
        # odd number divides them.
        return (count // 2, 1) if all(count % (2 * chunks - 1) for chunks in (2, 3, 4)) else None
    twice = count - messages.get(ends, 0)
    if twice <= 0 or twice % 2 or count % twice:
        return None
    return twice // 2, count // twice

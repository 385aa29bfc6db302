"""What a recorded job would have taken if nobody had been slow: a replay of its steps, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.doctor.findings import Number, Sheet
from ringside.errors import UsageError
from ringside.monitor import Verdict
from ringside.text import duration, percent

# -------------------------------------------------------------------------------------------------
# Replay a recorded step with other durations: a graph of operations, walked once for all steps and lanes together.
#
# The graph is that of *one* lane (one data-parallel replica with all its pipeline stages, or one rank); all lanes and
# steps share it, so a replay is a few NumPy operations per vertex (Lin et al., "Understanding Stragglers in Large Model
# Training Using What-if Analysis", arXiv 2505.05713, section 3.2).

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class DependencyGraph:
    """What waits for what inside one step of one lane.

    Args:
        names: One name per operation.
        after: For each operation, those that must have ended before it starts.
        groups: Operations that transfer data together: none ends before all have started. Each operation is in at
            most one; an operation in none is work that ends by itself.
        across: Operations whose group also waits for the same operation of every other lane.
    """

    names: Sequence[str]
    after: Sequence[Sequence[int]]
    groups: Sequence[Sequence[int]]
    across: frozenset[int] = frozenset()

    @cached_property
    def transfers(self) -> frozenset[int]:
        """Operations that are in a group."""
        return frozenset(op for group in self.groups for op in group)

    @cached_property
    def order(self) -> list[list[int]]:
        """Groups (and single operations as groups of one) in an order in which they can run.

        Raises:
            UsageError: Something waits for itself; the line names it.
        """
        vertices = [list(group) for group in self.groups]
        vertices += [[op] for op in range(len(self.names)) if op not in self.transfers]
        home = {op: index for index, vertex in enumerate(vertices) for op in vertex}
        before = {i: {home[dep] for op in vertex for dep in self.after[op]} for i, vertex in enumerate(vertices)}
        try:
            return [vertices[index] for index in TopologicalSorter(before).static_order()]
        except CycleError as error:
            stuck = self.names[vertices[min(error.args[1])][0]]
            raise UsageError(f"the recorded operations wait for each other in a circle, {stuck} among them") from None


def replay_steps(graph: DependencyGraph, seconds: Floats) -> Floats:
    """Return how long each step takes when every operation starts as soon as it can.

    Args:
        graph: What waits for what.
        seconds: Durations, float64 [ops, ..., lanes]: of work, or of the transfer once all of a group have started.

    Returns:
        float64 [...]: seconds from the step's start to the last end, over all lanes.
    """
    nothing = np.zeros(seconds.shape[1:])
    ends: dict[int, Floats] = {}
    last = nothing
    for vertex in graph.order:
        start = nothing
        for dep in {dep for op in vertex for dep in graph.after[op]}:
            start = np.maximum(start, ends[dep])
        if not graph.across.isdisjoint(vertex):
            start = np.broadcast_to(start.max(axis=-1, keepdims=True), start.shape)
        for op in vertex:
            ends[op] = start + seconds[op]
            last = np.maximum(last, ends[op])
    slowest: Floats = last.max(axis=-1)
    return slowest


# -------------------------------------------------------------------------------------------------
# The what-if answers: how much faster without stragglers, and how much of it one worker or the last stage explains.
#
# Definitions are those of Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis",
# arXiv 2505.05713, equations (1) to (5), as their published answers give them.

MOVING = ("-send", "-recv", "-reduce", "-gather", "-scatter", "clip-main-grad")
"""What types of operations that move data end with; all others are work."""
WORST_PERCENT = 3
"""`worst_worker_share` repairs the slowest 3% of the workers, at least one (equation 5)."""


@dataclass(frozen=True)
class Recording:
    """Recorded durations of the same operations in all steps and lanes.

    Args:
        graph: What waits for what.
        seconds: Durations, float64 [ops, steps, lanes].
        stages: Pipeline stage of each operation, int [ops].
        kinds: Type of each operation; its peers are all operations of that type, on every worker in every step.
        ranks: Rank of each worker, int [stages, lanes].
        ranks_per_worker: Ranks that one worker stands for (its tensor-parallel group).
        recorded_s: Duration of each step as it was recorded, float64 [steps], seconds.
        pipeline: Whether the stages are those of a pipeline.
        stride: How many training steps each step stands for, where only some were kept.
    """

    graph: DependencyGraph
    seconds: Floats
    stages: NDArray[np.int64]
    kinds: Sequence[str]
    ranks: NDArray[np.int64]
    ranks_per_worker: float
    recorded_s: Floats
    pipeline: bool = True
    stride: int = 1


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """What the job would have lost nothing of, had nobody been slow.

    Args:
        slowdown: S = mean step time replayed / mean step time replayed with every operation at its peers' usual
            duration: their mean for work, their median for transfers, as published.
        worst_worker_share: Share of the lost time that goes away when the slowest 3% of the workers (at least one)
            are repaired; None where nothing is lost.
        last_stage_share: The same for all workers of the last pipeline stage; None without a pipeline.
        cost_rank_hours: Rank-hours lost in the steps recorded.
        slowdown_at_median: S with the median for work, too: nothing of one slow worker is left in it.
        step_s: Mean replayed step, seconds.
        ideal_step_s: The same without stragglers.
        recorded_step_s: Mean step as it was recorded (with pauses that no operation explains).
        steps: Steps replayed.
        workers: Workers replayed.
        worst_ranks: Ranks of the workers repaired for `worst_worker_share`, slowest first.
        last_stage_ranks: Ranks of the last stage's workers.
        by_lane: Slowdown that each lane's (data-parallel replica's) operations alone cause.
        by_stage: Slowdown that each stage's operations alone cause.
        by_operation: Slowdown that each type of operation alone causes.
    """

    slowdown: float
    worst_worker_share: float | None
    last_stage_share: float | None
    cost_rank_hours: float
    slowdown_at_median: float
    step_s: float
    ideal_step_s: float
    recorded_step_s: float
    steps: int
    workers: int
    worst_ranks: list[int]
    last_stage_ranks: list[int]
    by_lane: list[float]
    by_stage: list[float]
    by_operation: dict[str, float]


def answer_what_if(recording: Recording) -> WhatIf:
    """Return the what-if answers for a recording; pure.

    Raises:
        UsageError: Its operations wait for each other in a circle.
    """
    graph, own = recording.graph, recording.seconds
    ideal = ideal_durations(recording)
    # All steps and lanes are alike in the ideal: one of each is enough.
    ideal_s = float(replay_steps(graph, ideal[:, :1, :1])[0])
    replayed = replay_steps(graph, own)
    step_s = float(replayed.mean())
    # Slowdown by each lane alone: it is slow, one ideal lane stands for all others; all lanes in one replay.
    seen = [own, ideal] if recording.ranks.shape[1] > 1 else [own]
    by_lane = replay_steps(graph, np.stack(seen, axis=-1)).mean(axis=0) / max(ideal_s, 1e-12)
    # By each stage, and by each type of operation, alone: as slow as it was, all others at their peers' pace.
    stages, kinds = recording.stages[:, None, None], np.array(recording.kinds)[:, None, None]
    last = int(stages.max())
    alone = [_mean_step_s(graph, np.where(stages == stage, own, ideal)) for stage in range(last + 1)]
    by_stage = np.array(alone) / max(ideal_s, 1e-12)
    by_operation = {
        kind: _mean_step_s(graph, np.where(kinds == kind, own, ideal)) / max(ideal_s, 1e-12)
        for kind in dict.fromkeys(recording.kinds)
    }
    # The slowest workers as (stage, lane): a worker is as slow as both its lane and its stage are (equation 4).
    scores = np.minimum(by_lane[None, :], by_stage[:, None])
    count = math.ceil(scores.size * WORST_PERCENT / 100)
    places = sorted(np.ndindex(*scores.shape), key=lambda place: (-scores[place], recording.ranks[place]))
    worst = [(int(stage), int(lane)) for stage, lane in places[:count]]
    lost = step_s - ideal_s

    def share(repaired: Floats) -> float | None:
        return (step_s - _mean_step_s(graph, repaired)) / lost if lost > 1e-9 * step_s else None

    # The slowest workers alone at their peers' pace.
    repaired = own.copy()
    for stage, lane in worst:
        rows = np.flatnonzero(recording.stages == stage)
        repaired[rows, :, lane] = ideal[rows, :, lane]
    at_median_s = float(replay_steps(graph, ideal_durations(recording, median=True)[:, :1, :1])[0])
    steps, workers = len(replayed) * recording.stride, recording.ranks.size
    return WhatIf(
        slowdown=step_s / ideal_s if ideal_s > 0 else 1.0,
        worst_worker_share=share(repaired),
        last_stage_share=share(np.where(stages == last, ideal, own)) if recording.pipeline else None,
        cost_rank_hours=lost * steps * workers * recording.ranks_per_worker / 3600.0,
        slowdown_at_median=step_s / max(at_median_s, 1e-12),
        step_s=step_s,
        ideal_step_s=ideal_s,
        recorded_step_s=float(recording.recorded_s.mean()),
        steps=len(replayed),
        workers=workers,
        worst_ranks=[int(recording.ranks[stage, lane]) for stage, lane in worst],
        last_stage_ranks=sorted(int(rank) for rank in recording.ranks[last]) if recording.pipeline else [],
        by_lane=by_lane.tolist(),
        by_stage=by_stage.tolist(),
        by_operation=by_operation,
    )


def ideal_durations(recording: Recording, *, median: bool = False) -> Floats:
    """Return the recording's durations with every operation at what its peers typically need.

    Args:
        recording: What was recorded.
        median: Take the median for work as well, where the mean of the published definition keeps a part of a slow
            worker's excess.

    Returns:
        float64 [ops, steps, lanes], the same for all operations of a type.
    """
    ideal = np.empty_like(recording.seconds)
    for kind in dict.fromkeys(recording.kinds):
        rows = np.flatnonzero([other == kind for other in recording.kinds])
        values = recording.seconds[rows]
        moves = kind == "transfer" or kind.endswith(MOVING)
        transfers = moves or not recording.graph.transfers.isdisjoint(rows.tolist())
        ideal[rows] = np.median(values) if median or transfers else values.mean()
    return ideal


def _mean_step_s(graph: DependencyGraph, seconds: Floats) -> float:
    return float(replay_steps(graph, seconds).mean())


# -------------------------------------------------------------------------------------------------
# The what-if answers as they are shown: for `--json`, as tables, as verdicts.

SLOW = 1.1
"""A job has stragglers if they make it this many times slower (section 4.1 of arXiv 2505.05713)."""
EXPLAINS = 0.5
"""The worst workers, or the last stage, are the reason if they explain this share of the lost time (section 5)."""
WORKERS = "replayed with only these workers repaired, the job gets faster: that alone"
STAGE = "the last pipeline stage has more to do than the others: that alone"
MOVE = (
    "Compare these ranks' clocks, temperature and neighbours with a healthy rank's; move them if nothing explains it."
)
REBALANCE = "Move layers from the last stage to the others: the loss and the vocabulary's projection weigh as well."


def as_dict(found: WhatIf, source: str) -> dict[str, Any]:
    """Return the content of `what_if` in `ringside doctor --json`; `source` names what was replayed."""
    return {**msgspec.to_builtins(found), "source": source}


def what_if_table(found: WhatIf) -> Sheet:
    """Return what each stage, replica and type of operation costs by itself, as a table."""
    alone = [(f"stage {stage}", value) for stage, value in enumerate(found.by_stage)]
    alone += [(f"replica {lane}", value) for lane, value in enumerate(found.by_lane)]
    alone += sorted(found.by_operation.items(), key=lambda item: -item[1])
    rows: list[list[Number | None]] = [[name, value, found.ideal_step_s * (value - 1)] for name, value in alone]
    note = (
        f"A step takes {duration(found.step_s)}, without stragglers {duration(found.ideal_step_s)}. Each row: only "
        "these operations as slow as they were, all others as their peers."
    )
    return Sheet(title="What if", columns=["slow alone", "slowdown", "seconds per step"], rows=rows, note=note)


def straggler_verdicts(found: WhatIf, steps: list[int], *, replicas: int) -> list[Verdict]:
    """Return who is the reason of the slowdown: single workers, or the last stage of the pipeline.

    Args:
        found: The answers.
        steps: Numbers of the steps replayed.
        replicas: Data-parallel replicas; with one, a worker is its whole stage and gets other work than the others.
    """
    if found.slowdown < SLOW or not steps:
        return []
    worst, last = found.worst_worker_share or 0.0, found.last_stage_share or 0.0
    pipeline = len(found.by_stage) > 1
    if worst >= EXPLAINS and (replicas > 1 or not pipeline):
        kind, ranks, share, who, advice = "slow_rank", found.worst_ranks, worst, WORKERS, MOVE
    elif last >= EXPLAINS and pipeline:
        kind, ranks, share, who, advice = "uneven_work", found.last_stage_ranks, last, STAGE, REBALANCE
    else:
        return []
    verdict = Verdict(
        kind=kind,
        ranks=sorted(ranks),
        since_step=steps[0],
        detected_step=steps[-1],
        excess_ratio=found.slowdown - 1.0,
        cause=f"{who} explains {percent(min(share, 1.0))} of the time lost",
        evidence={
            "slowdown": found.slowdown,
            "explained_ratio": share,
            "step_seconds": found.step_s,
            "ideal_step_seconds": found.ideal_step_s,
        },
        cost_rank_seconds=found.cost_rank_hours * 3600.0,
        advice=advice,
    )
    return [verdict]


# -------------------------------------------------------------------------------------------------
# Steps of data-parallel ranks, to be replayed: own work, then a synchronisation that waits for all.


def step_recording(
    own_s: Floats, exposed_s: Floats, step_s: Floats, ranks: Sequence[int], *, world_size: int = 0, stride: int = 1
) -> Recording:
    """Return the recording of steps of which only own times and waiting are known, such as those of Ringside's runs.

    All ranks leave a synchronisation together, and the last to come was blocked only while data moved: what
    synchronising took is the shortest time that any rank was blocked in that step.

    Args:
        own_s: Own times, float64 [steps, ranks], seconds, without gaps.
        exposed_s: Time blocked in synchronisation, the same.
        step_s: Whole steps, the same.
        ranks: The ranks.
        world_size: Ranks of the job, where these are only some of them.
        stride: How many training steps one row stands for.
    """
    transfer = np.broadcast_to(exposed_s.min(axis=1, keepdims=True), own_s.shape)
    graph = DependencyGraph(names=["work", "transfer"], after=[[], [0]], groups=[[1]], across=frozenset({1}))
    seconds = np.stack([own_s, transfer])
    recorded = step_s.mean(axis=1)
    return lanes_recording(graph, seconds, ["work", "transfer"], ranks, world_size, recorded, stride=stride)


def lanes_recording(
    graph: DependencyGraph,
    seconds: Floats,
    kinds: Sequence[str],
    ranks: Sequence[int],
    world_size: int,
    recorded_s: Floats,
    *,
    stride: int = 1,
) -> Recording:
    """Return a recording of a job without a pipeline: every rank is a lane of its own.

    Args:
        graph: What waits for what in a step.
        seconds: Durations, float64 [ops, steps, ranks], seconds.
        kinds: Type of each operation.
        ranks: The ranks.
        world_size: Ranks of the job, where these are only some of them.
        recorded_s: Steps as they were recorded, float64 [steps], seconds.
        stride: How many training steps one of `seconds` stands for.
    """
    return Recording(
        graph=graph,
        seconds=seconds,
        stages=np.zeros(len(graph.names), dtype=np.int64),
        kinds=kinds,
        ranks=np.array([list(ranks)]),
        ranks_per_worker=max(world_size, len(ranks)) / len(ranks),
        recorded_s=recorded_s,
        pipeline=False,
        stride=stride,
    )

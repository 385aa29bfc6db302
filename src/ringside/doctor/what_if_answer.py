"""The what-if answers: how much faster without stragglers, and how much of it one worker or the last stage explains.

Definitions are those of Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis",
arXiv 2505.05713, equations (1) to (5), as their published answers give them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.doctor.what_if_replay import Floats, Graph, replay

WORST_PERCENT = 3
"""`worst_worker_share` repairs the slowest 3 % of the workers, at least one (equation 5)."""


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

    graph: Graph
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
        slowdown: S = mean step time replayed / mean step time replayed with every operation at its peers' typical
            duration: their mean for work, their median for transfers, as published.
        worst_worker_share: Share of the lost time that goes away when the slowest 3 % of the workers (at least one)
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


def answer(recording: Recording) -> WhatIf:
    """Return the what-if answers for a recording; pure.

    Raises:
        UsageError: Its operations wait for each other in a circle.
    """
    graph, own = recording.graph, recording.seconds
    ideal = typical(recording)
    ideal_s = float(replay(graph, ideal[:, :1, :1])[0])
    replayed = replay(graph, own)
    step_s = float(replayed.mean())
    by_lane, by_stage = _by_lane(recording, ideal), _by_stage(recording, ideal)
    worst = _worst(by_lane, by_stage, recording.ranks)
    last = int(recording.stages.max())
    lost = step_s - ideal_s

    def share(repaired: Floats) -> float | None:
        return (step_s - float(replay(graph, repaired).mean())) / lost if lost > 1e-9 * step_s else None

    by_operation = {
        kind: _ratio(graph, np.where(_of_kind(recording, kind), own, ideal), ideal_s)
        for kind in dict.fromkeys(recording.kinds)
    }
    return WhatIf(
        slowdown=step_s / ideal_s if ideal_s > 0 else 1.0,
        worst_worker_share=share(_repair(recording, ideal, worst)),
        last_stage_share=share(np.where(_on(recording, last), ideal, own)) if recording.pipeline else None,
        cost_rank_hours=lost
        * len(replayed)
        * recording.stride
        * recording.ranks.size
        * recording.ranks_per_worker
        / 3600.0,
        slowdown_at_median=step_s / max(float(replay(graph, typical(recording, median=True)[:, :1, :1])[0]), 1e-12),
        step_s=step_s,
        ideal_step_s=ideal_s,
        recorded_step_s=float(recording.recorded_s.mean()),
        steps=len(replayed),
        workers=recording.ranks.size,
        worst_ranks=[int(recording.ranks[stage, lane]) for stage, lane in worst],
        last_stage_ranks=sorted(int(rank) for rank in recording.ranks[last]) if recording.pipeline else [],
        by_lane=[float(value) for value in by_lane],
        by_stage=[float(value) for value in by_stage],
        by_operation=by_operation,
    )


def typical(recording: Recording, *, median: bool = False) -> Floats:
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
        transfers = is_transfer(kind) or not recording.graph.transfers.isdisjoint(rows.tolist())
        ideal[rows] = np.median(values) if median or transfers else values.mean()
    return ideal


def is_transfer(kind: str) -> bool:
    """Return whether operations of this type move data (all others are work)."""
    return kind.endswith(("-send", "-recv", "-reduce", "-gather", "-scatter", "clip-main-grad")) or kind == "transfer"


def _by_lane(recording: Recording, ideal: Floats) -> Floats:
    """Slowdown by each lane alone: it is slow, one ideal lane stands for all others; all lanes in one replay."""
    seen = [recording.seconds, ideal] if recording.ranks.shape[1] > 1 else [recording.seconds]
    steps = replay(recording.graph, np.stack(seen, axis=-1))
    slowdowns: Floats = steps.mean(axis=0) / max(float(replay(recording.graph, ideal[:, :1, :1])[0]), 1e-12)
    return slowdowns


def _by_stage(recording: Recording, ideal: Floats) -> Floats:
    ideal_s = float(replay(recording.graph, ideal[:, :1, :1])[0])
    return np.array(
        [
            _ratio(recording.graph, np.where(_on(recording, stage), recording.seconds, ideal), ideal_s)
            for stage in range(int(recording.stages.max()) + 1)
        ]
    )


def _worst(by_lane: Floats, by_stage: Floats, ranks: NDArray[np.int64]) -> list[tuple[int, int]]:
    """The slowest workers as (stage, lane): a worker is as slow as both its lane and its stage are (equation 4)."""
    scores = np.minimum(by_lane[None, :], by_stage[:, None])
    count = math.ceil(scores.size * WORST_PERCENT / 100)
    places = sorted(np.ndindex(*scores.shape), key=lambda place: (-scores[place], ranks[place]))
    return [(int(stage), int(lane)) for stage, lane in places[:count]]


def _repair(recording: Recording, ideal: Floats, workers: Sequence[tuple[int, int]]) -> Floats:
    repaired: Floats = recording.seconds.copy()
    for stage, lane in workers:
        rows = np.flatnonzero(recording.stages == stage)
        repaired[rows, :, lane] = ideal[rows, :, lane]
    return repaired


def _ratio(graph: Graph, seconds: Floats, ideal_s: float) -> float:
    return float(replay(graph, seconds).mean()) / max(ideal_s, 1e-12)


def _on(recording: Recording, stage: int) -> NDArray[np.bool_]:
    chosen: NDArray[np.bool_] = (recording.stages == stage)[:, None, None]
    return chosen


def _of_kind(recording: Recording, kind: str) -> NDArray[np.bool_]:
    chosen: NDArray[np.bool_] = np.array([other == kind for other in recording.kinds])[:, None, None]
    return chosen

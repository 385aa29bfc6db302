"""Steps of data-parallel ranks, to be replayed: own work, then a synchronisation that waits for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringside.doctor.what_if_answer import Recording
from ringside.doctor.what_if_replay import Floats, Graph


def step_recording(
    own_s: Floats,
    exposed_s: Floats,
    step_s: Floats,
    ranks: Sequence[int],
    *,
    world_size: int = 0,
    stride: int = 1,
) -> Recording:
    """Return the recording of steps of which only own times and waiting are known, such as those of Ringside's runs.

    All ranks leave a synchronisation together, and whoever came last was blocked only while data moved: what
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
    graph = Graph(names=["work", "transfer"], after=[[], [0]], groups=[[1]], across=frozenset({1}))
    seconds = np.stack([own_s, transfer])
    recorded = step_s.mean(axis=1)
    return lanes_recording(graph, seconds, ["work", "transfer"], ranks, world_size, recorded, stride=stride)


def lanes_recording(
    graph: Graph,
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

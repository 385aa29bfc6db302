"""From a pipeline timeline to a recording that can be replayed: the same operations in all steps and lanes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ringside.doctor.pipeline.graph import dependency_graph
from ringside.doctor.pipeline.timeline import Cell, PipelineTimeline
from ringside.doctor.replay.graph import Floats
from ringside.doctor.replay.stragglers import Recording
from ringside.errors import UsageError

EARLY_S = 1e-2
"""A transfer that ends so much before its peer began was no transfer (clocks disagree, or it was buffered)."""


@dataclass(frozen=True)
class PreparedRecording:
    """A recording, and how many steps had to be left out because they do not hold the same operations."""

    recording: Recording
    steps: list[int]
    left_out: list[int]


def prepare_recording(timeline: PipelineTimeline) -> PreparedRecording:
    """Return the recording of a timeline.

    Steps in which some worker's operations differ from the most common ones (a truncated trace, another number of
    micro-batches) are left out; durations of transfers count from the moment when the last of a group has started.

    Raises:
        UsageError: No step holds the same operations on all lanes.
    """
    lanes, meta = timeline.lanes, timeline.meta
    counts = Counter(frozenset(cell) for cell in timeline.cells.values())
    if not counts:
        raise UsageError("the timeline holds no operation of a training step")
    most_common = max(counts, key=lambda keys: (counts[keys], len(keys)))
    whole = [
        step
        for step in timeline.steps
        if all(timeline.cells.get((step, lane), {}).keys() == most_common for lane in lanes)
    ]
    if not whole:
        raise UsageError(
            "no step holds the same operations on all data-parallel ranks; record whole steps of all ranks"
        )
    # All steps hold the same operations: one of them gives the graph.
    template: Cell = timeline.cells[whole[0], lanes[0]]
    numbers = sorted({key.stage for key in template})
    if numbers != list(range(len(numbers))):
        raise UsageError("some stages of the pipeline are not in the timeline; record all ranks")
    chunks = max(meta.vpp_size, 1 + max(operation.chunk for operation in template.values()))
    graph, keys = dependency_graph(template, chunks=chunks, replicas=max(len(lanes), meta.dp_size * meta.dsp_size))
    # Start and duration, float64 [ops, steps, lanes] each.
    cells = [[timeline.cells[step, lane] for lane in lanes] for step in whole]
    start = np.array([[[cell[key].start_s for cell in row] for row in cells] for key in keys])
    duration = np.array([[[cell[key].duration_s for cell in row] for row in cells] for key in keys])
    stages = np.array([key.stage for key in keys])
    # Durations, those of transfers counted from the last start of their group.
    seconds: Floats = duration.copy()
    for group in graph.groups:
        begun: Floats = start[list(group)].max(axis=0)
        if not graph.across.isdisjoint(group):
            begun = np.broadcast_to(begun.max(axis=-1, keepdims=True), begun.shape)
        for op in group:
            left = start[op] + duration[op] - begun
            seconds[op] = np.where(left <= -EARLY_S, 0.0, left)
    recording = Recording(
        graph=graph,
        seconds=seconds,
        stages=stages,
        kinds=[key.kind for key in keys],
        ranks=np.array([[timeline.ranks[stage, lane] for lane in lanes] for stage in numbers]),
        ranks_per_worker=meta.ranks_per_worker,
        recorded_s=(start + duration).max(axis=(0, 2)) - start.min(axis=(0, 2)),
    )
    return PreparedRecording(recording, whole, [step for step in timeline.steps if step not in set(whole)])

"""Replay a recorded step with other durations: a graph of operations, walked once for all steps and lanes together.

The graph is that of *one* lane (one data-parallel replica with all its pipeline stages, or one rank); all lanes and
steps share it, so a replay is a few NumPy operations per vertex (Lin et al., "Understanding Stragglers in Large Model
Training Using What-if Analysis", arXiv 2505.05713, section 3.2).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError

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
        before = [{home[dep] for op in vertex for dep in self.after[op]} for vertex in vertices]
        followers: list[list[int]] = [[] for _ in vertices]
        for index, deps in enumerate(before):
            for dep in deps:
                followers[dep].append(index)
        left = [len(deps) for deps in before]
        ready = deque(index for index, count in enumerate(left) if not count)
        order = []
        while ready:
            index = ready.popleft()
            order.append(vertices[index])
            for follower in followers[index]:
                left[follower] -= 1
                if not left[follower]:
                    ready.append(follower)
        if len(order) < len(vertices):
            stuck = next(vertices[index][0] for index, count in enumerate(left) if count)
            raise UsageError(f"the recorded operations wait for each other in a circle, {self.names[stuck]} among them")
        return order


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

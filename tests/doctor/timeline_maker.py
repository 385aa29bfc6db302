"""Pipeline timelines made by running the schedule itself: an oracle that knows nothing of dependency graphs.

Every operation's end is computed from the rules of (interleaved) 1F1B directly: a chunk's forward needs the chunk
before it, its backward the chunk behind it, and each worker does one thing after the other in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

Cost = Callable[[str, int, int, int], float]
"""Seconds of an operation: (kind, stage, replica, number of the micro-batch or -1)."""


@dataclass
class Shape:
    stages: int = 2
    replicas: int = 2
    micro_batches: int = 4
    chunks: int = 1
    overlap: bool = False
    records_idle_calls: bool = False
    steps: int = 2
    transfer_s: float = 0.001
    events: list[dict[str, Any]] = field(default_factory=list)

    def order(self, stage: int) -> list[tuple[str, int, int]]:
        """(direction, chunk, micro-batch) in the order in which a stage computes them."""
        total = self.micro_batches * self.chunks
        if self.chunks == 1:
            warm = min(self.stages - stage - 1, total)
        else:
            warm = min((self.stages - stage - 1) * 2 + (self.chunks - 1) * self.stages, total)
        forward = [("forward", *self._place(k)) for k in range(total)]
        backward = [("backward", self.chunks - 1 - c, b) for c, b in map(self._place, range(total))]
        steady = [one for pair in zip(forward[warm:], backward, strict=False) for one in pair]
        return [*forward[:warm], *steady, *backward[total - warm :]]

    def _place(self, k: int) -> tuple[int, int]:
        block = self.stages * self.chunks
        if self.chunks == 1:
            return 0, k
        return (k % block) // self.stages, (k // block) * self.stages + k % self.stages


def run(shape: Shape, cost: Cost, *, record: bool = True) -> float:
    """Run the steps; return the mean step, seconds, and leave the events in `shape.events`."""
    shape.events = []
    lengths = []
    origin = 0.0
    for step in range(shape.steps):
        length = _step(shape, cost, step, origin, record)
        lengths.append(length)
        origin += 1.1 * length
    if record:
        _name_threads(shape)
    return sum(lengths) / len(lengths)


def _step(shape: Shape, cost: Cost, step: int, origin: float, record: bool) -> float:
    pp, last = shape.stages, shape.stages * shape.chunks - 1
    begin = max(cost("params-all-gather", s, d, -1) for s in range(pp) for d in range(shape.replicas))
    computed: list[list[dict[tuple[str, int, int], tuple[float, float]]]] = []
    for replica in range(shape.replicas):
        orders = [shape.order(stage) for stage in range(pp)]
        places = [{one: index for index, one in enumerate(order)} for order in orders]

        @cache
        def end(stage: int, index: int, replica: int = replica, orders: Any = orders, places: Any = places) -> float:
            direction, chunk, batch = orders[stage][index]
            start = end(stage, index - 1) if index else begin
            whole = chunk * pp + stage
            source = whole - 1 if direction == "forward" else whole + 1
            if 0 <= source <= last:
                at = places[source % pp][direction, source // pp, batch]
                start = max(start, end(source % pp, at) + shape.transfer_s)
            elif direction == "backward":
                start = max(start, end(stage, places[stage]["forward", chunk, batch]))
            return start + cost(f"{direction}-compute", stage, replica, batch)

        computed.append(
            [
                {
                    one: (end(stage, i) - cost(f"{one[0]}-compute", stage, replica, one[2]), end(stage, i))
                    for i, one in enumerate(orders[stage])
                }
                for stage in range(pp)
            ]
        )
    ends = [[max(e for _, e in computed[d][s].values()) for s in range(pp)] for d in range(shape.replicas)]
    reduced = _reduce(shape, cost, ends, computed)
    clip = max(max(row) for row in reduced) + cost("optimizer-clip-main-grad", 0, 0, -1)
    done = max(clip + cost("optimizer", s, d, -1) for s in range(pp) for d in range(shape.replicas))
    if record:
        _record(shape, cost, step, origin, computed, reduced, clip)
    return done


def _reduce(shape: Shape, cost: Cost, ends: Any, computed: Any) -> list[list[float]]:
    """When each worker's gradients are reduced: layernorm, embedding (both ends), then over replicas."""
    pp = shape.stages
    level = [
        [ends[d][s] + cost("layernorm-grads-all-reduce", s, d, -1) for s in range(pp)] for d in range(shape.replicas)
    ]
    for d in range(shape.replicas):
        both = max(level[d][0], level[d][-1]) + cost("embedding-grads-all-reduce", 0, d, -1)
        level[d][0] = level[d][-1] = both
    together = [max(level[d][s] for d in range(shape.replicas)) for s in range(pp)]
    kind = "separate-grads-all-reduce" if shape.overlap else "grads-reduce-scatter"
    return [[together[s] + cost(kind, s, d, -1) for s in range(pp)] for d in range(shape.replicas)]


def _record(shape: Shape, cost: Cost, step: int, origin: float, computed: Any, reduced: Any, clip: float) -> None:
    pp, last = shape.stages, shape.stages * shape.chunks - 1
    for d in range(shape.replicas):
        ends = [max(e for _, e in computed[d][s].values()) for s in range(pp)]
        both = max(ends[s] + cost("layernorm-grads-all-reduce", s, d, -1) for s in (0, pp - 1))
        for s in range(pp):
            add = _adder(shape, step, origin, s, d)
            gather = cost("params-all-gather", s, d, -1)
            for chunk in range(shape.chunks):
                add("params-all-gather", gather * chunk / shape.chunks, gather / shape.chunks, 3, chunk)
            for (direction, chunk, batch), (start, stop) in computed[d][s].items():
                add(f"{direction}-compute", start, stop - start, 0, chunk, batch)
                whole, step_on = chunk * pp + s, 1 if direction == "forward" else -1
                if 0 <= whole + step_on <= last or shape.records_idle_calls:
                    add(f"{direction}-send", stop, shape.transfer_s, 1)
                if 0 <= whole - step_on <= last:
                    peer = computed[d][(whole - step_on) % pp][direction, (whole - step_on) // pp, batch][1]
                    add(f"{direction}-recv", peer, shape.transfer_s, 1)
                elif shape.records_idle_calls:
                    add(f"{direction}-recv", start - shape.transfer_s / 8, shape.transfer_s / 8, 1)
            add("gc", ends[s], 0.0, 0)
            norm = cost("layernorm-grads-all-reduce", s, d, -1)
            add("layernorm-grads-all-reduce", ends[s], norm, 3)
            if s in (0, pp - 1):
                add("embedding-grads-all-reduce", both, cost("embedding-grads-all-reduce", 0, d, -1), 3)
            kind = "separate-grads-all-reduce" if shape.overlap else "grads-reduce-scatter"
            add(kind, reduced[d][s] - cost(kind, s, d, -1), cost(kind, s, d, -1), 3, 0)
            if shape.overlap:
                for chunk in range(shape.chunks):
                    ready = max(e for (way, c, _), (_, e) in computed[d][s].items() if (way, c) == ("backward", chunk))
                    add("grads-reduce-scatter", ready, 1e-6, 3, chunk)
            top = cost("optimizer-clip-main-grad", 0, 0, -1)
            add("optimizer-clip-main-grad", clip - top, top, 3)
            add("optimizer", clip, cost("optimizer", s, d, -1), 0)


def _adder(shape: Shape, step: int, origin: float, stage: int, replica: int) -> Any:
    counts: dict[str, int] = {}
    pending: list[dict[str, Any]] = []

    def add(kind: str, start: float, seconds: float, lane: int, chunk: int = -1, batch: int = -1) -> None:
        rank = stage * shape.replicas + replica
        args = {"step": step + 7, "model_chunk": chunk, "mb_id": batch, "seq_id": counts.get(kind, 0)}
        counts[kind] = counts.get(kind, 0) + 1
        shape.events.append(
            {"name": kind, "cat": kind, "ph": "X", "pid": replica, "tid": rank * 5 + lane,
             "ts": 1e6 * (origin + start), "dur": 1e6 * seconds, "args": args}
        )  # fmt: skip
        pending.append(shape.events[-1])

    return add


def _name_threads(shape: Shape) -> None:
    for stage in range(shape.stages):
        for replica in range(shape.replicas):
            rank = stage * shape.replicas + replica
            for lane, word in enumerate(("compute", "pp-comm", "tp-comm", "dp-comm", "misc")):
                name = f"PP rank {stage}, TP rank 0, {word}"
                shape.events.append(
                    {"name": "thread_name", "ph": "M", "pid": replica, "tid": rank * 5 + lane, "args": {"name": name}}
                )
    for replica in range(shape.replicas):
        args = {"name": f"DP rank [{replica}]"}
        shape.events.append({"name": "process_name", "ph": "M", "pid": replica, "args": args})

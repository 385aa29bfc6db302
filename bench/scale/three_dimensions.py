"""A job of 1,024 ranks in three dimensions, simulated: is the slow rank named, how soon, and how fast is it analysed?

Arrivals at every collective are simulated: tensor parallelism inside a host, data parallelism and a pipeline's stages
between hosts, one rank 25% slower from a step on. What ranks record of it (own times, and how long they were blocked in
each group, each on a clock of its own) goes through the collector as in a job. Clocks are offset by ±50 ms and drift by
50 ppm; nothing depends on them but the times of the records.

    python -m bench.scale.three_dimensions
    python -m bench.scale.three_dimensions --trials 4 --jitter 0.1
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from bench.common import make_parser
from numpy.typing import NDArray

from ringside.monitor.collector import StepCollector
from ringside.monitor.run.records import Group, GroupUse, StepRecord

STAGES, REPLICAS, TENSOR = 4, 32, 8
LAYERS, LAYER_S = 4, 0.006
HEALTHY, SLOW = 60, 40
TRANSFER_S = 0.0002
AXES = {"pp": 0, "dp": 1, "tp": 2}


@dataclass
class Job:
    """Ranks as stages × replicas × tensor, tensor innermost."""

    jitter: float
    noise: np.random.Generator

    def __post_init__(self) -> None:
        self.shape = (STAGES, REPLICAS, TENSOR)
        self.ranks = STAGES * REPLICAS * TENSOR
        self.of = np.arange(self.ranks).reshape(self.shape)
        offset = self.noise.uniform(-0.05, 0.05, (self.ranks // TENSOR, 1))
        self.offset = np.broadcast_to(offset, (self.ranks // TENSOR, TENSOR)).reshape(self.shape)
        self.drift = 1.0 + self.noise.normal(0.0, 5e-5, self.shape)
        # A heavier last stage: it has the loss.
        self.work = np.full(self.shape, LAYER_S)
        self.work[-1] *= 1.3

    def groups(self) -> list[Group]:
        """Return all groups, as ranks announce them."""
        found = []
        for name, axis in AXES.items():
            for index, ranks in enumerate(np.moveaxis(self.of, axis, -1).reshape(-1, self.shape[axis])):
                found.append(
                    Group(
                        name=f"{name}/{index}",
                        description=f"mesh_{name}",
                        ranks=tuple(map(int, ranks)),
                        has_messages=name == "pp",
                    )
                )
        return found

    def step(self, now: NDArray[np.float64], factor: NDArray[np.float64]) -> tuple[Any, dict[str, Any]]:
        """Play a step: return when each rank is done, and how long it was blocked along each dimension."""
        blocked = {name: np.zeros(self.shape) for name in AXES}
        began = now
        # One micro-batch for all: forward a stage waits for the one before, backward for the one behind.
        forward = [(stage, stage - 1, 1.0) for stage in range(STAGES)]
        for stage, awaited, pieces in [*forward, *((stage, stage + 1, 2.0) for stage in reversed(range(STAGES)))]:
            if 0 <= awaited < STAGES:
                ready = np.maximum(now[stage], now[awaited])
                blocked["pp"][stage] += ready - now[stage]
                now = np.concatenate([now[:stage], ready[None], now[stage + 1 :]])
            now = self._layers(now, factor, blocked, slice(stage, stage + 1), pieces)
        over = np.broadcast_to(now.max(axis=1, keepdims=True), self.shape) + TRANSFER_S
        blocked["dp"] += over - now
        return over, {"seconds": over - began, **blocked}

    def _layers(self, now: Any, factor: Any, blocked: dict[str, Any], stage: slice, pieces: float) -> Any:
        now = now.copy()
        for _ in range(LAYERS):
            work = self.work[stage] * pieces * factor[stage]
            work = work * np.exp(self.jitter * self.noise.standard_normal(work.shape))
            arrived = now[stage] + work
            over = np.broadcast_to(arrived.max(axis=2, keepdims=True), arrived.shape) + TRANSFER_S
            blocked["tp"][stage] += over - arrived
            now[stage] = over
        return now


def rank_groups(job: Job) -> list[list[str]]:
    """Return the names of each rank's groups, in the order of `AXES`."""
    names: list[list[str]] = [[] for _ in range(job.ranks)]
    for group in job.groups():
        for rank in group.ranks:
            names[rank].append(group.name)
    return names


def trial(jitter: float, seed: int) -> tuple[list[str], int, float, int]:
    """Return who was named, at which step, how many steps a second were analysed, and who was slow."""
    noise = np.random.default_rng(seed)
    job = Job(jitter, noise)
    slow = int(noise.integers(job.ranks))
    collector = StepCollector(job.ranks)
    names = rank_groups(job)
    now, said, detected, analysed = np.zeros(job.shape), list[str](), -1, 0.0
    for step in range(HEALTHY + SLOW):
        factor = np.ones(job.shape)
        if step >= HEALTHY:
            factor.reshape(-1)[slow] = 1.25
        now, told = job.step(now, factor)
        seconds = (told["seconds"] * job.drift).reshape(-1)
        blocked = {name: (told[name] * job.drift).reshape(-1) for name in AXES}
        exposed = sum(blocked.values())
        ended = (now + job.offset).reshape(-1)
        records = [
            StepRecord(
                step=step,
                rank=rank,
                ended_unix=float(ended[rank]),
                step_seconds=float(seconds[rank]),
                own_seconds=float(seconds[rank] - exposed[rank]),
                exposed_seconds=float(exposed[rank]),
                compute_seconds=float(seconds[rank] - exposed[rank]),
                wait_seconds=float("nan"),
                groups=tuple(
                    GroupUse(name, -1, 1, 0, float(blocked[axis][rank]))
                    for name, axis in zip(names[rank], AXES, strict=True)
                    if axis != "pp"
                ),
                new_groups=tuple(job.groups()) if step == rank == 0 else (),
            )
            for rank in range(job.ranks)
        ]
        began = time.perf_counter()
        events = collector.add(records)
        analysed += time.perf_counter() - began
        for event in events:  # the last stage is heavier, which is nobody's fault
            if event["kind"] == "verdict" and event["verdict"]["kind"] != "stage_imbalance":
                verdict = event["verdict"]
                said.append(f"{verdict['kind']} of {verdict['ranks']} ({verdict['evidence'].get('place')})")
                if verdict["ranks"] == [slow] and detected < 0:
                    detected = step
    return said, detected, (HEALTHY + SLOW) / analysed, slow


def main() -> None:
    """Run the trials and print a line for each jitter."""
    parser = make_parser("bench.scale.three_dimensions", __doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--jitter", type=float, nargs="+", default=[0.02, 0.1])
    options = parser.parse_args()
    for jitter in options.jitter:
        right, wrong, delays, speeds = 0, list[str](), list[int](), list[float]()
        for seed in range(options.trials):
            said, detected, speed, slow = trial(jitter, seed)
            in_time = 0 <= detected - HEALTHY <= 40
            right += in_time
            delays += [detected - HEALTHY] if in_time else []
            wrong += [words for words in said if f"of [{slow}]" not in words]
            speeds.append(speed)
        print(
            f"jitter {jitter:.0%}: {right} of {options.trials} right, {len(wrong)} wrong; "
            f"median {np.median(delays) if delays else float('nan'):.0f} steps after the onset; "
            f"{np.median(speeds):.1f} steps a second analysed",
            flush=True,
        )
        for words in wrong:
            print(f"  wrong: {words}", flush=True)


if __name__ == "__main__":
    main()

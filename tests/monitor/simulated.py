"""Simulated arrivals: ranks compute, issue collectives and wait for them, and record what they would have measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ringside.monitor.run.records import GroupUse, Row, StepRecord
from ringside.monitor.stats import Floats


class Ranks:
    """What ranks do in one job, step by step.

    Args:
        count: Number of ranks.
        seed: Of their noise.
        jitter: Standard deviation of the log of what anything takes.

    Attributes:
        now: Each rank's clock, seconds, [ranks].
        routed: Bytes of all-to-alls in the step under way, [ranks].
    """

    def __init__(self, count: int, seed: int, jitter: float = 0.03) -> None:
        self.now, self.routed = np.zeros(count), np.zeros(count, dtype=int)
        self._noise, self._jitter = np.random.default_rng(seed), jitter
        self._began, self._step = self.now.copy(), 0
        self._uses: list[defaultdict[tuple[str, int], list[float]]]
        self._begin()

    def _begin(self) -> None:
        self._began = self.now.copy()
        self._uses = [defaultdict(lambda: [0, 0.0]) for _ in self.now]
        self.routed[:] = 0

    def compute(self, seconds: float | Floats, ranks: Sequence[int] | slice = slice(None)) -> None:
        """Ranks work for so long."""
        work = np.broadcast_to(seconds, self.now[ranks].shape)
        self.now[ranks] += work * np.exp(self._noise.normal(0, self._jitter, work.shape))

    def wait(self, group: str, ranks: Sequence[int], issued: Floats, transfer: float | Floats = 0.001) -> None:
        """Ranks need what they issued at these moments, [ranks of the job]; it is over some time after the last."""
        over = issued[list(ranks)].max() + np.broadcast_to(transfer, len(ranks))
        for rank, end in zip(ranks, over, strict=True):
            self._block(rank, (group, -1), float(end))

    def message(self, group: str, source: int, target: int, transfer: float = 0.0005) -> None:
        """One rank sends, and another needs it."""
        self._uses[source][group, target][0] += 1
        self._block(target, (group, source), float(self.now[source]) + transfer)

    def _block(self, rank: int, key: tuple[str, int], until: float) -> None:
        use = self._uses[rank][key]
        use[0] += 1
        use[1] += max(until - self.now[rank], 0.0)
        self.now[rank] = max(self.now[rank], until)

    def step_ends(self, clock: float | Floats = 0.0) -> Row:
        """Return the records of the step; wall clocks are off by so much, seconds."""
        seconds = self.now - self._began
        unix = self.now + np.broadcast_to(clock, self.now.shape)
        row = {}
        for rank, uses in enumerate(self._uses):
            blocked = sum(one[1] for one in uses.values())
            row[rank] = StepRecord(
                step=self._step, rank=rank, ended_unix=float(unix[rank]), step_seconds=float(seconds[rank]),
                own_seconds=float(seconds[rank]) - blocked, exposed_seconds=blocked,
                compute_seconds=float(seconds[rank]) - blocked, wait_seconds=float("nan"),
                routed_bytes=int(self.routed[rank]),
                groups=tuple(GroupUse(*key, int(count), 1024, waited) for key, (count, waited) in uses.items()),
            )  # fmt: skip
        self._step += 1
        self._begin()
        return row


def gpipe(ranks: Ranks, lines: Sequence[Sequence[int]], seconds: Floats, micro_batches: int) -> None:
    """Play forward and backward of one step of GPipe.

    Args:
        ranks: They.
        lines: The pipelines: ranks in the order of their stages.
        seconds: What forward of a micro-batch takes on each rank (backward: twice that), [ranks].
        micro_batches: Of the step.
    """
    for line in lines:
        for order, times in ((line, 1.0), (line[::-1], 2.0)):
            for _ in range(micro_batches):
                for place, rank in enumerate(order):
                    if place:
                        ranks.message("pp", order[place - 1], rank)
                    ranks.compute(times * seconds[rank], [rank])

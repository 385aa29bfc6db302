"""An attempt at a step: own micro-batches into the slots of an exchange, sums over all members, and their digest."""

from __future__ import annotations

import time
from collections.abc import MutableMapping

import numpy as np
import torch
from numpy.typing import NDArray

from ringside.pytorch.recording.parameter_digests import digest
from ringside.survive.all_reduce.between_hosts import NetExchange
from ringside.survive.all_reduce.one_host import HostExchange
from ringside.survive.cluster.waiting import GaveUp, Superseded
from ringside.survive.data.micro_batches import KeptBatch
from ringside.survive.job import SurviveJob
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i

AnyExchange = HostExchange | NetExchange


class Attempt:
    """What one worker computes and holds of the step at hand.

    Args:
        job: What is trained.
        spent: Seconds by kind; what digests take is added here.

    Attributes:
        total: The private copy of the sums, uint8 [size_bytes].
    """

    def __init__(self, job: SurviveJob, spent: MutableMapping[str, float]) -> None:
        self._job, self._spent = job, spent
        self.total: NDArray[np.uint8] = np.zeros(job.work.flat.size_bytes, dtype=np.uint8)
        self._kept: list[KeptBatch] = []
        self._check_state = False

    def compute(self, compute: i.Compute, exchange: AnyExchange) -> e.Event:
        """Fill this worker's slots; what an earlier attempt has computed of the step is used again."""
        job, step = self._job, compute.tag.step
        job.phases.step = step
        job.work.begin(step)
        filled: list[KeptBatch] = []
        computed, began = 0, time.perf_counter()
        for slot, wanted in zip(exchange.slots, self._wanted(compute.micro_batches), strict=True):
            computed += job.work.fill(step, wanted, slot, self._kept)
            filled.append(KeptBatch(step, frozenset(wanted), slot))
            job.phases.reached("compute")
        if computed:
            exchange.tell_own((time.perf_counter() - began) / computed)
        self._kept, self._check_state = filled, compute.check_state
        return e.WorkDone(compute.tag)

    def add_up(self, wanted: i.RunExchange, exchange: AnyExchange) -> e.Event | None:
        """Make the private copy of the sums over all members; None: it is not wanted any more."""
        try:
            exchange.run(wanted.tag.step, self.total)
        except GaveUp as failure:
            self._leave_total()
            return e.AttemptFailed(wanted.tag, failure.suspects, failure.broken)
        except Superseded:
            self._leave_total()
            return None
        self._job.phases.reached("after_receive")
        state = f"{self._job.state.digest():016x}" if self._check_state else ""
        began = time.perf_counter()
        result = f"{digest(torch.from_numpy(self.total)):016x}"
        self._spent["digest"] += time.perf_counter() - began
        return e.ResultReady(wanted.tag, result, state)

    def _leave_total(self) -> None:
        """Go on with other memory: the thread of an exchange that was given up may still write into this."""
        self.total = np.zeros_like(self.total)

    def _wanted(self, micro_batches: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return which micro-batches each slot of this rank holds."""
        if self._job.per_micro_batch:
            return [(number,) for number in micro_batches]
        return [micro_batches] if micro_batches else []


__all__ = ["AnyExchange", "Attempt"]

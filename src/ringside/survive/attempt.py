"""An attempt at a step: own micro-batches into the slots of an exchange, sums over all members, and their digest.

What it leaves is a private copy of the sums (`Attempt.total`): nobody else can write it, so its digest stays true until
a decision stands.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping

import numpy as np
import torch

from ringside.engine.transports.base import Bytes
from ringside.pytorch.recording.parameter_digests import digest
from ringside.survive.all_reduce.between_hosts import NetExchange
from ringside.survive.all_reduce.one_host import HostExchange
from ringside.survive.cluster.peers import GaveUp, Superseded
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
        self.total: Bytes = np.zeros(job.work.flat.size_bytes, dtype=np.uint8)
        self._kept: list[KeptBatch] = []
        self._check_state = False

    def compute(self, compute: i.Compute, exchange: AnyExchange) -> e.Event:
        """Fill this worker's slots; what an earlier attempt has computed of the step is used again."""
        job, step = self._job, compute.tag.step
        job.failpoints.step = step
        job.work.begin(step)
        filled: list[KeptBatch] = []
        computed, began = 0, time.perf_counter()
        # A slot per micro-batch, or one for all of them: as `own_slots` has laid them out.
        own = compute.micro_batches
        in_slots = [(number,) for number in own] if job.per_micro_batch else [own] if own else []
        for slot, micro_batches in zip(exchange.slots, in_slots, strict=True):
            computed += job.work.fill(step, micro_batches, slot, self._kept)
            filled.append(KeptBatch(step, frozenset(micro_batches), slot))
            job.failpoints.reached("compute")
        if computed:  # seconds for one, by which micro-batches are shared out; what was kept took no time
            exchange.publish_own_time((time.perf_counter() - began) / computed)
        self._kept, self._check_state = filled, compute.check_state
        return e.WorkDone(compute.tag)

    def reduce(self, instruction: i.RunExchange, exchange: AnyExchange) -> e.Event | None:
        """Make the private copy of the sums over all members; None: it is not wanted any more."""
        try:
            exchange.run(instruction.tag.step, self.total)
        except GaveUp as failure:
            self._replace_total()
            return e.AttemptFailed(instruction.tag, failure.suspects, failure.broken)
        except Superseded:
            self._replace_total()
            return None
        self._job.failpoints.reached("after_receive")
        state = f"{self._job.state.digest():016x}" if self._check_state else ""
        began = time.perf_counter()
        result = f"{digest(torch.from_numpy(self.total)):016x}"
        self._spent["digest"] += time.perf_counter() - began
        return e.ResultReady(instruction.tag, result, state)

    def _replace_total(self) -> None:
        """Go on with other memory: the thread of an exchange that was aborted may still write into this."""
        self.total = np.zeros_like(self.total)

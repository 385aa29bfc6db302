"""All-reduces of a communicator whose ranks are on several hosts: by which algorithm, and what their times teach."""

from __future__ import annotations

import functools
import logging
import math
import time
from typing import Any

import numpy as np
import torch

from ringside.engine.algorithm import AlgorithmSpec, canonical_choice, refuse_other_orders
from ringside.engine.buffers import Flat, flatten
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OPS
from ringside.engine.net.collectives import run_collective
from ringside.engine.net.exchange.block_scaling import BlockScaling, ErrorFeedback
from ringside.engine.net.hierarchical import HierarchicalEngine, PendingAllReduce
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import SUM, Reduction
from ringside.engine.request import CoreRequest
from ringside.engine.shm.log import AcrossLog
from ringside.engine.shm.memory import Storage
from ringside.engine.tuner.drift import EVERY_NOTED, LARGE_BYTES
from ringside.engine.tuner.explain import AlgorithmChange
from ringside.engine.tuner.selector import Tuner
from ringside.errors import MismatchError, UsageError
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.recording import session as sessions
from ringside.schedule import Schedule

_log = logging.getLogger(__name__)

STEADY = 16
"""Buckets in a row by one algorithm, after which the run is told of it: before, others may be on trial."""
Key = tuple[int, int, str, "str | Schedule | None"]
"""What tells small all-reduces apart: elements, code of the dtype, reduction, algorithm."""


class BetweenHosts:
    """Runs all-reduces between hosts on the thread that calls: as requested, else as measurement has found.

    Args:
        across: The engine between hosts.
        options: The communicator's.

    Attributes:
        across: As given.
        selector: Chooses the algorithm; None: it is requested, or the reproducible one, or `start` was not called.
        log: The times of gradient buckets.
    """

    def __init__(self, across: HierarchicalEngine, options: Options) -> None:
        self.across, self._options = across, options
        self.selector: Tuner | None = None
        self.log = AcrossLog()
        self._has_said_whole = False
        self._carried, self._in_a_row, self._told = "", 0, ""

    def start(self) -> None:
        """Choose an algorithm for every size by measurement, unless one is requested. A collective."""
        options = self._options
        if options.choice is None and not options.reproducible:
            key = {"wire_dtype": options.wire.dtype if options.wire else "float32", "torch": str(torch.__version__)}
            self.selector = Tuner(self.across, {**key, **options.agreed()}, wire=options.wire)
            self.selector.listeners.append(functools.partial(record_algorithm_change, self.across.rank_map))
            self.selector.start()

    def explain(self, size_bytes: int) -> str:
        """Describe by which algorithm an all-reduce of float32 of that size is run, and why."""
        if self.selector is not None:
            return str(self.selector.explain(size_bytes))
        if self._options.choice is not None:
            return f"{size_bytes} bytes: {self._options.choice}, as asked for"
        reproducible = canonical_choice(size_bytes, self.across.rank_map.size)
        return f"{size_bytes} bytes: {reproducible}, the reproducible one for this size"

    # -------------------------------------------------------------------------------------------- collectives

    def fixed(self, algorithm: str | Schedule | None, flat: Flat) -> AlgorithmSpec | None:
        """Return the algorithm that the call or the communicator requests; None: neither."""
        if isinstance(algorithm, Schedule):
            raise UsageError("between hosts an algorithm is given by name")
        choice = AlgorithmSpec.parse(algorithm) if algorithm else self._options.choice
        if choice is not None and self._options.reproducible:
            refuse_other_orders(
                choice, self.across.rank_map.size, flat.dtype, is_rounded=self._options.wire is not None
            )
        return choice

    def reduction(self, dtype: int, op: int, scale: float, weight: tuple[float, int] | None) -> Reduction:
        """Return what is done with the elements; with a weight a collective, by which every rank learns all weights.

        Args:
            dtype: Code of the element type.
            op: Code of the reduction.
            scale: Multiplies each contribution.
            weight: This rank's, and its list's fingerprint (`ringside.engine.dtypes`); None: there is none.
        """
        if weight is None:
            wire = self._options.wire
            reduction = Reduction(dtype, op, scale, wire=wire)
            if wire is not None and wire.sums_only and not (reduction.is_encoded or self._has_said_whole):
                self._has_said_whole = True
                _log.warning(
                    "wire_dtype=%r is for sums and means of float32: others, such as %s of %s, travel as they are",
                    wire.dtype,
                    OPS[op],
                    DTYPES[dtype],
                )
            return reduction
        roster = self.across.rank_map
        rows = np.zeros((roster.size, 2))  # each rank's weight, and its list's fingerprint
        flat, to = flatten(np.array([weight[0], float(weight[1])])), flatten(rows)
        bounds = list(range(0, 2 * roster.size + 1, 2))
        run_collective(self.across, CoreRequest("all_gather", flat, 2 * roster.size, bounds, out=to.address, keeps=to))
        if len(set(rows[:, 1])) > 1:
            raise MismatchError(f"all_reduce on rank {roster.rank}: ranks gave different lists of weights")
        scales = tuple(rows[:, 0].tolist())
        if not sum(scales) > 0:
            raise UsageError("the weights of all ranks sum to 0, so there is no mean")
        return Reduction(dtype, op, weight[0], scales=scales, divisor=math.fsum(scales), wire=self._options.wire)

    def all_reduce(self, flat: Flat, reduction: Reduction, fixed: AlgorithmSpec | None, key: Key | None) -> None:
        """Reduce a tensor; without a fixed algorithm, by the one that the tuner chooses at this point of the run.

        Args:
            flat: The tensor.
            reduction: What is done with its elements.
            fixed: The algorithm; None: none is requested.
            key: By which `run_cached` finds the next one of its kind, if that is a small one; None: it shall not.
        """
        size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
        choice, tuner = self._choose(size_bytes, reduction, fixed)
        if tuner is not None:
            tuner.begin_trial(flat.numel, reduction, choice)
        began = time.perf_counter()
        self.across.all_reduce(flat.address, flat.numel, reduction, choice)
        if tuner is not None:
            tuner.after(size_bytes, choice, time.perf_counter() - began, dtype=reduction.dtype)
        if key is None:
            return
        # Keep what the next one of its kind may be run by at once.
        if tuner is not None:
            if size_bytes >= LARGE_BYTES or tuner.is_trial_due(size_bytes, reduction.dtype, reduction.op):
                return
            choice = tuner.choose(size_bytes, reduction.dtype, reduction.op)
        version = 0 if self.selector is None else self.selector.version
        small = self.across.prepare(flat.numel, reduction, choice)
        if small is not None:
            if tuner is not None:
                small.size_class = tuner.size_class(size_bytes)
            self.across.keep_small((*key, version), small)

    def run_cached(self, key: Key, flat: Flat) -> bool:
        """Run a small all-reduce that was called before; False: it was not, or the tuner has other choices by now."""
        # At a few bytes every line of Python that is not needed shows: a rank that has slept finds none in the cache.
        tuner = self.selector
        small = self.across.small.get((*key, 0 if tuner is None else tuner.version))
        if small is None:
            return False
        if tuner is None or key[3] is not None:
            self.across.run_prepared(small, flat.address)
        else:
            calls = tuner.calls[small.size_class] + 1
            if calls >= tuner.trial_at.get(small.size_class, math.inf):
                call = small.operation.call
                if tuner.is_trial_due(small.size_bytes, call.dtype, call.op):
                    return False
            tuner.calls[small.size_class] = calls
            began = time.perf_counter()
            self.across.run_prepared(small, flat.address)
            if calls % EVERY_NOTED == 0:  # as the tuner itself counts those that are not ready
                tuner.note(small.size_bytes, small.spec, time.perf_counter() - began, flat.dtype)
        flat.write_back()
        return True

    @property
    def fed_back(self) -> BlockScaling | None:
        """How gradient buckets travel, where what is rounded away is to be fed back; None: nothing is."""
        wire = self._options.wire
        return wire if isinstance(wire, BlockScaling) and self._options.feeds_back else None

    def start_storage(
        self, flat: Flat, storage: Storage | None, *, scale: float, stamp_ns: int, feedback: ErrorFeedback | None = None
    ) -> PendingAllReduce | None:
        """Start to all-reduce (sum) a gradient bucket on the thread that calls, and return what is waited for.

        The next one may be started before that; all ranks start and wait in the same order.

        Args:
            flat: The tensor.
            storage: The shareable storage it lies in; None: a private tensor.
            scale: Multiplies each contribution.
            stamp_ns: When the tensor was ready, on the monotonic clock.
            feedback: How it travels, in place of the communicator's wire: the same one in every step.

        Returns:
            None where it is done already, as a trial of an algorithm is, which has the links for itself.
        """
        reduction = Reduction(flat.dtype, SUM, scale, wire=feedback or self._options.wire, storage=storage)
        size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
        choice, tuner = self._choose(size_bytes, reduction, self.fixed(None, flat))
        is_trial = tuner is not None and tuner.begin_trial(flat.numel, reduction, choice)
        bucket = self.across.start(flat.address, flat.numel, reduction, choice)
        bucket.record, bucket.stamp_ns = self.record, stamp_ns
        if is_trial or bucket.is_done:
            bucket.wait()
            return None
        return bucket

    def record(self, all_reduce: PendingAllReduce) -> None:
        """Have the tuner and the log know what a bucket took; the tuner may vote, which calls other collectives."""
        sync_ns, size_bytes = time.monotonic_ns() - all_reduce.stamp_ns, all_reduce.size_bytes
        if self.selector is not None:  # then no bucket's algorithm is requested
            dtype = all_reduce.operation.call.dtype
            self.selector.after(size_bytes, all_reduce.spec, all_reduce.took_s, dtype=dtype)
        name = all_reduce.operation.algorithm
        self.log.note(name, sync_ns, size_bytes)
        self._in_a_row = self._in_a_row + 1 if name == self._carried else 1
        self._carried = name
        if self._in_a_row == STEADY and name != self._told:
            self._told = name
            session = sessions.current()
            if session is not None and session.size == self.across.rank_map.size:
                wire_dtype = self._options.wire.dtype if self._options.wire else "float32"
                session.put_event("carried", {"algorithm": name, "wire_dtype": wire_dtype})

    def _choose(
        self, size_bytes: int, reduction: Reduction, fixed: AlgorithmSpec | None
    ) -> tuple[AlgorithmSpec, Tuner | None]:
        """Return the algorithm, and the tuner that learns how long it takes."""
        if fixed is not None or self.selector is None:
            return fixed or canonical_choice(size_bytes, self.across.rank_map.size), None
        return self.selector.choose(size_bytes, reduction.dtype, reduction.op), self.selector


def record_algorithm_change(roster: RankMap, change: AlgorithmChange) -> None:
    """Record what a tuner decides anew in the session of this process, if it has one and the group is of all its ranks.

    Links are named by the first rank of each host.

    Args:
        roster: Who is where, in the group that decided.
        change: What it decided.
    """
    session = sessions.current()
    if session is None or session.size != roster.size:
        return
    links: list[dict[str, Any]] = []
    for link in change.slow:
        ends = [link.src] if link.dst < 0 else [link.src, link.dst]  # dst < 0: a host as a whole
        hosts = {"ranks": [roster.hosts[end][0] for end in ends], "hosts": [roster.names[end] for end in ends]}
        links.append({**hosts, "bytes_per_s": link.bytes_per_s, "usual_bytes_per_s": link.usual})
    fields = {name: value for name, value in vars(change).items() if name not in ("slow", "found")}
    session.put_event("revised", {"step": session.clock.step, **fields, "links": links})

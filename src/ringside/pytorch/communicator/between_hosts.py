"""All-reduces of a communicator whose ranks are on several hosts: by which algorithm, and what their times teach."""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ringside.engine.algorithm import AlgorithmSpec, canonical_choice, refuse_other_orders
from ringside.engine.buffers import Flat, flatten
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.collectives import run_collective
from ringside.engine.net.hierarchical import HierarchicalEngine, PendingAllReduce, Reduction
from ringside.engine.net.reduction import SUM
from ringside.engine.request import CoreRequest
from ringside.engine.shm.log import AcrossLog
from ringside.engine.shm.memory import Storage
from ringside.engine.tuner.drift import EVERY_NOTED, LARGE_BYTES
from ringside.engine.tuner.selector import Tuner
from ringside.errors import MismatchError, UsageError
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.recording.algorithm_changes import record_algorithm_change
from ringside.schedule import Schedule

# -------------------------------------------------------------------------------------------------
# Small all-reduces between hosts that were called before: run with nothing left to look up.
#
# At a few bytes every line of Python that is not needed shows: a rank that has slept finds none of them in the cache.


class PreparedAllReduce(NamedTuple):
    """A small all-reduce for which all is ready.

    Args:
        execute: Runs it on the elements at an address.
        size_bytes: Of the tensor.
        choice: The algorithm.
        selector: The tuner that chose it and learns its times; None: it was requested.
        version: Of the tuner's choices; this one is stale when there are others.
        size_class: The tuner's, of that size.
    """

    execute: Callable[[int], None]
    size_bytes: int
    choice: AlgorithmSpec
    selector: Tuner | None = None
    version: int = 0
    size_class: int = 0

    def run(self, flat: Flat) -> bool:
        """Reduce a tensor; False: the tuner has other choices by now, and nothing was done."""
        selector = self.selector
        if selector is None:
            self.execute(flat.address)
        elif self.version != selector.version:
            return False
        else:
            calls = selector.calls[self.size_class] = selector.calls[self.size_class] + 1
            began = time.perf_counter()
            self.execute(flat.address)
            if calls % EVERY_NOTED == 0:  # as the tuner itself counts those that are not prepared
                selector.note(self.size_bytes, self.choice, time.perf_counter() - began, flat.dtype)
        flat.write_back()
        return True


def prepare(
    across: HierarchicalEngine, flat: Flat, reduction: Reduction, choice: AlgorithmSpec, selector: Tuner | None
) -> PreparedAllReduce | None:
    """Return what the next all-reduce of this kind may be run by at once; None: it has to be looked up again.

    Args:
        across: The engine that runs it.
        flat: The tensor of this one.
        reduction: What is done with its elements.
        choice: The algorithm of this one.
        selector: The tuner that chose that, and chooses for the next one; None: it was requested.
    """
    size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
    if selector is not None:
        if size_bytes >= LARGE_BYTES or not selector.settled(size_bytes):
            return None
        choice = selector.choose(size_bytes, reduction.dtype, reduction.op)
    small = across.prepare(flat.numel, reduction, choice)
    if small is None:
        return None
    execute = functools.partial(across.run_prepared, small)
    if selector is None:
        return PreparedAllReduce(execute, size_bytes, choice)
    return PreparedAllReduce(execute, size_bytes, choice, selector, selector.version, selector.size_class(size_bytes))


Key = tuple[int, int, str, "str | Schedule | None"]
"""What tells small all-reduces apart: elements, code of the dtype, reduction, algorithm."""

_MOST_PREPARED = 128  # kinds of calls; a program with more has them looked up again


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
        self._prepared: dict[Key, PreparedAllReduce] = {}
        self._ended = 0.0  # when the newest bucket was done, on the performance counter
        self._pending: deque[PendingBucket] = deque()  # in the order in which they were started

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
            refuse_other_orders(choice, self.across.rank_map.size, flat.dtype)
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
            return Reduction(dtype, op, scale, wire=self._options.wire)
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
        # A trial: buffers and connections are made before it is timed, and all ranks start together.
        if tuner is not None and tuner.tries(size_bytes, choice, reduction.dtype):
            self.across.rehearse(flat.numel, reduction, choice)
            tuner.assemble()
        began = time.perf_counter()
        self.across.all_reduce(flat.address, flat.numel, reduction, choice)
        if tuner is not None:
            tuner.after(size_bytes, choice, time.perf_counter() - began, dtype=reduction.dtype)
        prepared = prepare(self.across, flat, reduction, choice, tuner)
        if prepared is not None and key is not None:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepared

    def run_cached(self, key: Key, flat: Flat) -> bool:
        """Run a small all-reduce that was called before; False: it was not, or the tuner has other choices by now."""
        prepared = self._prepared.get(key)
        return prepared is not None and prepared.run(flat)

    def start_storage(
        self, flat: Flat, storage: Storage | None, *, scale: float, stamp_ns: int
    ) -> PendingBucket | None:
        """Start to all-reduce a bucket; see `Communicator.start_storage`.

        A trial of an algorithm has the links for itself, and is done when this returns.
        """
        reduction = Reduction(flat.dtype, SUM, scale, wire=self._options.wire, storage=storage)
        size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
        choice, tuner = self._choose(size_bytes, reduction, self.fixed(None, flat))
        is_trial = tuner is not None and tuner.tries(size_bytes, choice, reduction.dtype)
        if is_trial and tuner is not None:
            while self._pending:
                self._pending[0].wait()
            self.across.rehearse(flat.numel, reduction, choice)
            tuner.assemble()
        began = time.perf_counter()
        all_reduce = self.across.start(flat.address, flat.numel, reduction, choice)
        bucket = PendingBucket(self, all_reduce, size_bytes, choice, tuner, reduction.dtype, began, stamp_ns)
        self._pending.append(bucket)
        if not is_trial:
            return bucket
        bucket.wait()
        return None

    def _choose(
        self, size_bytes: int, reduction: Reduction, fixed: AlgorithmSpec | None
    ) -> tuple[AlgorithmSpec, Tuner | None]:
        """Return the algorithm, and the tuner that learns how long it takes."""
        if fixed is not None or self.selector is None:
            return fixed or canonical_choice(size_bytes, self.across.rank_map.size), None
        return self.selector.choose(size_bytes, reduction.dtype, reduction.op), self.selector


@dataclass(frozen=True, eq=False)
class PendingBucket:
    """A gradient bucket under way.

    Args:
        between: Started it.
        all_reduce: The engine's part.
        size_bytes: Of it.
        choice: The algorithm.
        tuner: Learns how long it takes; None: none does.
        dtype: Code of the element type.
        began: When it was started, on the performance counter.
        stamp_ns: When it was ready, on the monotonic clock.
    """

    between: BetweenHosts
    all_reduce: PendingAllReduce
    size_bytes: int
    choice: AlgorithmSpec
    tuner: Tuner | None
    dtype: int
    began: float
    stamp_ns: int

    def wait(self) -> None:
        """Return when the result is there, and record how long it took; once."""
        between = self.between
        if self not in between._pending:
            return
        between._pending.remove(self)
        self.all_reduce.wait()
        ended = time.perf_counter()
        took_s = ended - max(self.began, between._ended)  # it queued behind the one before it
        between._ended = ended
        if self.tuner is not None:
            self.tuner.after(self.size_bytes, self.choice, took_s, dtype=self.dtype)
        between.log.note(str(self.choice), time.monotonic_ns() - self.stamp_ns, self.size_bytes)

"""All-reduces of a communicator whose ranks are on several hosts: which way, and what is learned of what it took."""

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
from ringside.engine.request import CoreRequest
from ringside.engine.shm.log import AcrossLog
from ringside.engine.shm.memory import Storage
from ringside.engine.tuner.drift import EVERY_NOTED, LARGE_BYTES
from ringside.engine.tuner.selector import Tuner
from ringside.errors import MismatchError, UsageError
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.recording.algorithm_changes import tell_run
from ringside.schedule import Schedule

# -------------------------------------------------------------------------------------------------
# Small all-reduces between hosts that were called before: carried out with nothing left to be found out.
#
# At a few bytes every line that is not needed shows: a rank that has slept finds none of them in the cache.


class PreparedAllReduce(NamedTuple):
    """A small all-reduce for which all is ready.

    Args:
        go: Carries it out on the elements at an address.
        size_bytes: Of the tensor.
        choice: How.
        selector: Who chose it and is told what it took; None: it was asked for.
        version: Of the selector's choices; it is of no more use when there are others.
        size_class: The selector's, of that size.
    """

    go: Callable[[int], None]
    size_bytes: int
    choice: AlgorithmSpec
    selector: Tuner | None = None
    version: int = 0
    size_class: int = 0

    def run(self, flat: Flat) -> bool:
        """Reduce a tensor; False: the selector has other choices by now, and nothing was done."""
        selector = self.selector
        if selector is None:
            self.go(flat.address)
        elif self.version != selector.version:
            return False
        else:
            calls = selector.calls[self.size_class] = selector.calls[self.size_class] + 1
            began = time.perf_counter()
            self.go(flat.address)
            if calls % EVERY_NOTED == 0:  # as the selector itself counts those that come another way
                selector.note(self.size_bytes, self.choice, time.perf_counter() - began, flat.dtype)
        flat.write_back()
        return True


def made_ready(
    across: HierarchicalEngine, flat: Flat, what: Reduction, choice: AlgorithmSpec, selector: Tuner | None
) -> PreparedAllReduce | None:
    """Return what the next all-reduce of this kind may be carried out with at once; None: it may not.

    Args:
        across: Who carries it out.
        flat: The tensor of this one.
        what: The reduction.
        choice: How this one was carried out.
        selector: Who chose that, and chooses for the next one; None: it was asked for.
    """
    size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
    if selector is not None:
        if size_bytes >= LARGE_BYTES or not selector.settled(size_bytes):
            return None
        choice = selector.choose(size_bytes, what.dtype, what.op)
    small = across.prepare(flat.numel, what, choice)
    if small is None:
        return None
    go = functools.partial(across.run_prepared, small)
    if selector is None:
        return PreparedAllReduce(go, size_bytes, choice)
    return PreparedAllReduce(go, size_bytes, choice, selector, selector.version, selector.size_class(size_bytes))


Key = tuple[int, int, str, "str | Schedule | None"]
"""What tells small all-reduces apart: elements, code of the dtype, reduction, algorithm."""

_MOST_READY = 128


class BetweenHosts:
    """Carries out all-reduces between hosts on the thread that calls: as asked for, else as measurement has found.

    Args:
        across: Carries a choice out.
        options: What the communicator was asked for.

    Attributes:
        across: As given.
        selector: Chooses; None: the way is asked for, or the reproducible one, or `start` was not called.
        log: What gradient buckets took.
    """

    def __init__(self, across: HierarchicalEngine, options: Options) -> None:
        self.across, self._options = across, options
        self.selector: Tuner | None = None
        self.log = AcrossLog()
        self._ready: dict[Key, PreparedAllReduce] = {}
        self._ended = 0.0
        self._begun: deque[_Bucket] = deque()  # that are not finished

    def start(self) -> None:
        """Find out by measurement how to go about every size, unless that is asked for. A collective."""
        options = self._options
        if options.choice is None and not options.reproducible:
            key = {"wire_dtype": options.wire.dtype if options.wire else "float32", "torch": str(torch.__version__)}
            self.selector = Tuner(self.across, {**key, **options.agreed()}, wire=options.wire)
            self.selector.listeners.append(functools.partial(tell_run, self.across.rank_map))
            self.selector.start()

    def explain(self, size_bytes: int) -> str:
        """Say how an all-reduce of float32 of that size is carried out and why."""
        if self.selector is not None:
            return str(self.selector.explain(size_bytes))
        if self._options.choice is not None:
            return f"{size_bytes} bytes: {self._options.choice}, as asked for"
        reproducible = canonical_choice(size_bytes, self.across.rank_map.size)
        return f"{size_bytes} bytes: {reproducible}, the reproducible one for this size"

    # -------------------------------------------------------------------------------------------- carrying out

    def fixed(self, algorithm: str | Schedule | None, flat: Flat) -> AlgorithmSpec | None:
        """Return what was asked for, by call or by communicator; None: nothing."""
        if isinstance(algorithm, Schedule):
            raise UsageError("between hosts an algorithm is given by name")
        choice = AlgorithmSpec.parse(algorithm) if algorithm else self._options.choice
        if choice is not None and self._options.reproducible:
            refuse_other_orders(choice, self.across.rank_map.size, flat.dtype)
        return choice

    def reduction(self, dtype: int, op: int, scale: float, weight: tuple[float, int] | None) -> Reduction:
        """Return what is to be done with the elements; with a weight a collective, as all ranks tell theirs.

        Args:
            dtype: Code of the element type.
            op: Code of the reduction.
            scale: Multiplies each contribution.
            weight: This rank's, and what tells lists of weights apart (`ringside.engine.dtypes`); None: there is none.
        """
        if weight is None:
            return Reduction(dtype, op, scale, wire=self._options.wire)
        roster = self.across.rank_map
        told = np.zeros((roster.size, 2))
        flat, to = flatten(np.array([weight[0], float(weight[1])])), flatten(told)
        bounds = list(range(0, 2 * roster.size + 1, 2))
        run_collective(self.across, CoreRequest("all_gather", flat, 2 * roster.size, bounds, out=to.address, keeps=to))
        if len(set(told[:, 1])) > 1:
            raise MismatchError(f"all_reduce on rank {roster.rank}: ranks gave different lists of weights")
        scales = tuple(told[:, 0].tolist())
        if not sum(scales) > 0:
            raise UsageError("the weights of all ranks sum to 0, so there is no mean")
        return Reduction(dtype, op, weight[0], scales=scales, divisor=math.fsum(scales), wire=self._options.wire)

    def all_reduce(self, flat: Flat, what: Reduction, fixed: AlgorithmSpec | None, key: Key | None) -> None:
        """Reduce a tensor; without a fixed way, as the selector says at this point of the run.

        Args:
            flat: The tensor.
            what: The reduction.
            fixed: How; None: nothing was asked for.
            key: By what `again` finds the next one of its kind, if that is a small one; None: it shall not.
        """
        size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
        choice, judged = self._choose(size_bytes, what, fixed)
        if judged is not None and judged.tries(size_bytes, choice, what.dtype):
            self.across.rehearse(flat.numel, what, choice)
            judged.assemble()
        began = time.perf_counter()
        self.across.all_reduce(flat.address, flat.numel, what, choice)
        if judged is not None:
            judged.after(size_bytes, choice, time.perf_counter() - began, dtype=what.dtype)
        ready = made_ready(self.across, flat, what, choice, judged)
        if ready is not None and key is not None:
            if len(self._ready) >= _MOST_READY:
                self._ready.clear()
            self._ready[key] = ready

    def again(self, key: Key, flat: Flat) -> bool:
        """Carry out a small all-reduce that was called before; False: it was not, or is to go another way by now."""
        ready = self._ready.get(key)
        return ready is not None and ready.run(flat)

    def begin_storage(
        self, flat: Flat, storage: Storage | None, *, scale: float, stamp_ns: int
    ) -> Callable[[], None] | None:
        """Begin to all-reduce a bucket and return what finishes it; see `Communicator.begin_storage`.

        A turn of a choice that is tried out has the links for itself, and is done when this returns.
        """
        what = Reduction(flat.dtype, 0, scale, wire=self._options.wire, storage=storage)
        size_bytes = flat.numel * ITEM_BYTES[flat.dtype]
        choice, judged = self._choose(size_bytes, what, self.fixed(None, flat))
        alone = judged is not None and judged.tries(size_bytes, choice, what.dtype)
        if alone and judged is not None:
            while self._begun:
                self._begun[0].finish()
            self.across.rehearse(flat.numel, what, choice)
            judged.assemble()
        began = time.perf_counter()
        under_way = self.across.start(flat.address, flat.numel, what, choice)
        bucket = _Bucket(self, under_way, size_bytes, choice, judged, what.dtype, began, stamp_ns)
        self._begun.append(bucket)
        if not alone:
            return bucket.finish
        bucket.finish()
        return None

    def _choose(
        self, size_bytes: int, what: Reduction, fixed: AlgorithmSpec | None
    ) -> tuple[AlgorithmSpec, Tuner | None]:
        """Return the way, and who is to be told what it took."""
        if fixed is not None or self.selector is None:
            return fixed or canonical_choice(size_bytes, self.across.rank_map.size), None
        return self.selector.choose(size_bytes, what.dtype, what.op), self.selector


@dataclass(frozen=True, eq=False)
class _Bucket:
    """A gradient bucket that was begun.

    Args:
        between: Whose it is.
        under_way: Its all-reduce.
        size_bytes: Of it.
        choice: How it travels.
        judged: Who is told what it took; None: nobody.
        dtype: Code of the element type.
        began: When, on the performance counter.
        stamp_ns: When it was ready, on the monotonic clock.
    """

    between: BetweenHosts
    under_way: PendingAllReduce
    size_bytes: int
    choice: AlgorithmSpec
    judged: Tuner | None
    dtype: int
    began: float
    stamp_ns: int

    def finish(self) -> None:
        """Return when the result is there, and note what it took; once."""
        between = self.between
        if self not in between._begun:
            return
        between._begun.remove(self)
        self.under_way.wait()
        ended = time.perf_counter()
        took_s = ended - max(self.began, between._ended)  # it queued behind the one before it
        between._ended = ended
        if self.judged is not None:
            self.judged.after(self.size_bytes, self.choice, took_s, dtype=self.dtype)
        between.log.note(str(self.choice), time.monotonic_ns() - self.stamp_ns, self.size_bytes)

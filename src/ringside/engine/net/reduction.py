"""What is to be done to the elements of a tensor, and one rank's part in it between hosts."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside import _core
from ringside._core import numpy_kernels as twins
from ringside._core.enums import DType, Kind, ReduceOp
from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OPS
from ringside.engine.net.exchange.exchange import ExchangeRequest, Fold
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.signature import (
    OWN_SCALE,
    WHOLE_FOLD,
    WIRE_FLAGS,
    CollectiveSignature,
)
from ringside.engine.net.exchange.wire import Wire
from ringside.engine.net.rank_map import RankMap
from ringside.engine.shm.memory import Storage

# -------------------------------------------------------------------------------------------------
# Elementwise reduction of memory by address: the native kernels where they are built, their NumPy twins elsewhere.

_native: Any = _core.native() if _core.available() else None
SUM, AVG = int(ReduceOp.sum), int(ReduceOp.avg)


def fold(
    sources: Sequence[int],
    target: int,
    elements: int,
    dtype: int,
    op: int,
    *,
    scale: float = 1.0,
    scales: Sequence[float] = (),
    divisor: float = 1.0,
) -> None:
    """Fold arrays left to right into one that may be one of them.

    Args:
        sources: Addresses of the arrays, in order.
        target: Address of the result.
        elements: Length of each.
        dtype: Code of the element type.
        op: Code of the reduction.
        scale: Multiplies each contribution first (floating dtypes, sum and avg).
        scales: One for each source, in place of `scale`.
        divisor: What avg divides the finished sum by.
    """
    if _native is not None:
        _native.fold(list(sources), [target], elements, dtype, op, scale, divisor, False, "", list(scales))
        return
    name = DTYPES[dtype]
    arrays = [_array(address, elements, dtype) for address in sources]
    _array(target, elements, dtype)[...] = twins.fold(
        arrays, name, OPS[op], scale=scale, scales=scales or None, divisor=divisor
    )


def make_fold(dtype: int, op: int, *, scale: float = 1.0, scales: Sequence[float] = (), divisor: float = 1.0) -> Fold:
    """Return `fold` for one dtype and reduction; without a divisor an average is only summed."""
    step = SUM if op == AVG and divisor == 1.0 else op
    return functools.partial(fold, dtype=dtype, op=step, scale=scale, scales=scales, divisor=divisor)


def bytes_at(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes at an address as a writable array; it does not keep them alive."""
    if size_bytes == 0:
        return np.empty(0, dtype=np.uint8)
    # Nothing here keeps the memory alive: its owner does, until the collective is over.
    raw: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    return np.frombuffer(raw, dtype=np.uint8)


def _array(address: int, elements: int, dtype: int) -> NDArray[Any]:
    name = DTYPES[dtype]
    return bytes_at(address, elements * ITEM_BYTES[dtype]).view(twins.STORED_AS.get(name, np.dtype(name)))


ALL_REDUCE = int(Kind.all_reduce)
_FLOAT32 = int(DType.float32)
_HALVES = (int(DType.float16), int(DType.bfloat16))


@dataclass(frozen=True, slots=True)
class Reduction:
    """What is to be done to the elements.

    Args:
        dtype: Code of the element type.
        op: Code of the reduction.
        scale: Multiplies this rank's contribution first.
        scales: All ranks' scales, by rank, where they may differ; empty: all have `scale`.
        divisor: What avg divides the sum by; 0: the number of ranks.
        wire: How float32 elements travel between ranks (`is_encoded`); None: as they are.
        storage: The shareable storage the tensor lies in, if the host's ranks may not have mapped it yet.
    """

    dtype: int
    op: int
    scale: float = 1.0
    scales: tuple[float, ...] = ()
    divisor: float = 0.0
    wire: Wire | None = None
    storage: Storage | None = None

    @property
    def is_encoded(self) -> bool:
        """Whether elements travel by `wire`: float32 does, and where it says so only of sums and means."""
        wire = self.wire
        return wire is not None and self.dtype == _FLOAT32 and (self.fold_op == SUM or not wire.sums_only)

    @property
    def fold_op(self) -> int:
        """What is folded of it: of an average the sum, which is divided afterwards."""
        return SUM if self.op == AVG else self.op


@dataclass(frozen=True, slots=True)
class ReductionPlan:
    """What one rank does between hosts, worked out from a spec.

    Args:
        request: Its part of the schedule, and what peers compare; None: it calls the group's own all-reduce.
        reduction: The reduction, an average of halves as a sum of shares.
        pre_scale: Multiplies the elements before anything is sent; 1.0: nothing does.
        divisor: What the elements are divided by at the very end; 0.0: by nothing.
    """

    request: ExchangeRequest | None
    reduction: Reduction
    pre_scale: float = 1.0
    divisor: float = 0.0


def plan_reduction(
    spec: AlgorithmSpec,
    members: Sequence[int] | None,
    reduction: Reduction,
    call: CollectiveSignature,
    rank_map: RankMap,
) -> ReductionPlan:
    """Return this rank's part in a reduction over all ranks, or over one of every host.

    Args:
        spec: How.
        members: One rank per host; None: all ranks, host borders ignored.
        reduction: The reduction.
        call: What was called.
        rank_map: Which ranks are on which host.
    """
    plan, item = None, ITEM_BYTES[reduction.dtype]
    if spec.algorithm != NATIVE:
        vertices, me = (rank_map.size, rank_map.rank) if members is None else (len(members), rank_map.host)
        plan = plan_messages(spec.schedule(vertices), me)
        if members is not None:  # vertices beyond the ranks are switches, and belong to every selection of ranks
            members = (*members, *range(rank_map.size, rank_map.size + plan.switches))
    # A plan that adds up all contributions in one fold scales and divides in it, so that nothing is rounded twice.
    whole = (
        plan is not None and plan.whole_folds and reduction.wire is None and not (reduction.scales and plan.switches)
    )
    if not whole:
        reduction = safe_mean(reduction, rank_map.size)
    divisor = reduction.divisor or rank_map.size
    if plan is not None and plan.switches:  # the reducer does what the header asks, which may be less than was called
        call = call._replace(op=reduction.op, extra=reduction.scale if whole else 1.0)
    if whole and plan is not None:
        all_at_once = make_fold(
            reduction.dtype, reduction.op, scale=reduction.scale, scales=reduction.scales, divisor=divisor
        )
        call = call._replace(flags=call.flags | WHOLE_FOLD)
        return ReductionPlan(ExchangeRequest(plan, item, all_at_once, call, members=members), reduction)
    # Else every rank scales its elements first. An average is divided in the last fold of a chunk, where whatever is
    # sent after that is a finished chunk (`MessagePlan.finished`), or by every rank at the very end.
    fold_by = last = make_fold(reduction.dtype, reduction.op)
    if reduction.op == AVG and plan is not None and plan.finished and not plan.switches:
        last = make_fold(reduction.dtype, AVG, divisor=divisor)
    left = divisor if reduction.op == AVG and last is fold_by else 0.0
    request = None
    if plan is not None:
        request = ExchangeRequest(plan, item, fold_by, call, last, members, reduction.wire)
    return ReductionPlan(request, reduction, reduction.scale, left)


def signature_of(reduction: Reduction, elements: int) -> CollectiveSignature:
    """Return what peers compare of an all-reduce; scales that may differ are not compared."""
    flags = OWN_SCALE if reduction.scales else 0
    if reduction.wire is not None:
        flags |= WIRE_FLAGS[reduction.wire.dtype]
    return CollectiveSignature(
        kind=ALL_REDUCE,
        dtype=reduction.dtype,
        op=reduction.op,
        elements=elements,
        extra=1.0 if reduction.scales else reduction.scale,
        flags=flags,
    )


def safe_mean(reduction: Reduction, size: int) -> Reduction:
    """Return an average of halves (in memory or on the wire) as a sum of shares, which cannot overflow on its way."""
    narrow = reduction.dtype in _HALVES or (reduction.wire is not None and reduction.wire.dtype == "float16")
    if reduction.op != AVG or not narrow:
        return reduction
    divisor = reduction.divisor or size
    scales = tuple(scale / divisor for scale in reduction.scales)
    return replace(reduction, op=SUM, scale=reduction.scale / divisor, scales=scales)

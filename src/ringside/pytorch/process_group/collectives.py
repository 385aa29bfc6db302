"""What every collective of torch.distributed is in terms of a communicator.

Each function takes the communicator, then tensors and options as torch's process groups take them; it checks them and
returns the tensors that will hold the result and the job that fills them. Nothing is sent before the job runs. Gloo
wants contiguous tensors of equal sizes; these take any strides and, in lists, sizes that differ by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ringside.engine import HostCommunicator
from ringside.engine.buffers import Flat, flatten
from ringside.engine.dtypes import ITEM_BYTES, dtype_code
from ringside.engine.request import CoreRequest, checked_op, equal_bounds
from ringside.engine.shm.memory import Storage
from ringside.errors import UsageError
from ringside.pytorch.process_group.arguments import check_parts, in_turn, lane_of, parts_of
from ringside.pytorch.process_group.list_collectives import (
    all_gather,
    all_gather_lists,
    all_reduce_sparse,
    all_to_all,
    exchange,
    gather,
    reduce_scatter,
    scatter,
)
from ringside.pytorch.process_group.tensors import is_plain, is_premultiplied, overlap, plain, reduction

# -------------------------------------------------------------------------------------------------
# Small all-reduces of the process group inside a host, which are started at the call.
#
# The payload is written for the other ranks at the call, which waits for nobody, and the thread that waits for the
# result reads theirs. Ranks that never meet in a wait still go on, since what they need of this one is there.

MOST_RANKS = 8
MOST_READ_BYTES = 256 << 10  # every rank reads all payloads; with more of them that is the larger part


def is_one_shot(comm: Any, size_bytes: int) -> bool:
    """Tell whether an all-reduce of that size is run in one shot; all ranks come to the same answer."""
    if not isinstance(comm, HostCommunicator) or comm.size > MOST_RANKS:
        return False
    return size_bytes <= comm.inline_bytes and size_bytes * comm.size <= MOST_READ_BYTES


Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Job = Callable[[], None]
Plan = tuple[list[Tensor], Job]
Collective = Callable[..., Plan]


def all_reduce(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """Reduce each tensor over all ranks, in place; sparse ones (COO) by sum or avg."""
    return list(tensors), in_turn([_all_reduce_job(comm, tensor, opts.reduceOp) for tensor in tensors])


def _all_reduce_job(comm: Any, tensor: Tensor, reduce_op: Any) -> Job:
    op, scale = reduction(reduce_op, tensor.dtype)
    if tensor.layout == torch.sparse_coo:
        return lambda: all_reduce_sparse(comm, tensor, op)
    x = plain(tensor)
    algorithm = "one_shot" if is_one_shot(comm, x.flat.nbytes) else None

    def job() -> None:
        comm.all_reduce(x.flat, op, scale=scale, algorithm=algorithm)
        x.write_back()

    return job


Small = tuple[Flat, int, float]
"""A tensor, the code of a reduction, and what to multiply with first."""

_codes: dict[tuple[Any, Any], tuple[int, int, int]] = {}


def small(comm: HostCommunicator, tensors: Tensors, opts: Any) -> Small | None:
    """Return what a host's communicator posts for an all-reduce of one small tensor; None where it is not that."""
    tensor = tensors[0]
    if len(tensors) != 1 or not tensor.is_cpu or tensor.layout is not torch.strided or not is_plain(tensor):
        return None
    numel, reduce_op = tensor.numel(), opts.reduceOp
    key = tensor.dtype, reduce_op.op
    codes = _codes.get(key)
    if codes is None:
        # Of dtype and reduction (-1: a sum with a factor), and how many numbers an element is.
        op, _ = reduction(reduce_op, tensor.dtype)
        dtype = dtype_code((torch.view_as_real(tensor) if tensor.is_complex() else tensor).dtype)
        has_factor = is_premultiplied(reduce_op)
        code = checked_op(Flat(0, 0, dtype, (0,), None), op, scaled=has_factor)
        codes = _codes[key] = dtype, -1 if has_factor else code, 2 if tensor.is_complex() else 1
    dtype, code, numbers = codes
    numel *= numbers
    if not is_one_shot(comm, numel * ITEM_BYTES[dtype]):
        return None
    scale = 1.0 if code >= 0 else reduction(reduce_op, tensor.dtype)[1]
    return Flat(tensor.data_ptr(), numel, dtype, (numel,), tensor), max(code, 0), scale


def broadcast(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """Copy the tensors of rank `opts.rootRank` to all ranks."""
    xs = [plain(tensor, moved=True) for tensor in tensors]

    def job() -> None:
        for x in xs:
            comm.broadcast(x.flat, opts.rootRank)
            x.write_back()

    return list(tensors), job


def reduce(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """Reduce tensors over all ranks into those of rank `opts.rootRank`; the others' stay as they are."""
    op, scale = reduction(opts.reduceOp, tensors[0].dtype)
    if scale != 1.0:
        raise UsageError("reduce takes no factor: multiply the tensor first, or use all_reduce")
    xs = [plain(tensor) for tensor in tensors]

    def job() -> None:
        for x in xs:
            comm.reduce(x.flat, opts.rootRank, op)
            x.write_back()

    return list(tensors), job


def barrier(comm: Any, opts: Any) -> Plan:
    """Finish when every rank has called it."""
    return [], comm.barrier


# ------------------------------------------------------------------------------------------------ one tensor for all


def all_gather_single(comm: Any, output: Tensor, tensor: Tensor, opts: Any) -> Plan:
    """Give every rank the tensors of all ranks one after the other; the input may be this rank's part of the output."""
    to, x = plain(output, moved=True), plain(tensor, moved=True).flat
    check_parts("all_gather", to.flat, x, comm.size)

    def job() -> None:
        if not overlap(to.flat, x):
            comm.all_gather(x, out=to.flat)
        else:
            lane_of(to.flat, comm).copy_(x)
            comm.all_gather_(to.flat, equal_bounds(x.numel(), comm.size))
        to.write_back()

    return [output], job


def all_gather_shared(comm: Any, output: Tensor, tensor: Tensor, storage: Storage, opts: Any) -> Plan:
    """`all_gather_single` into a contiguous tensor in a storage that the other ranks can map."""
    to, x = plain(output, moved=True).flat, plain(tensor, moved=True).flat
    if not isinstance(comm, HostCommunicator):
        return all_gather_single(comm, output, tensor, opts)
    check_parts("all_gather", to, x, comm.size)
    flat, bounds = flatten(to), equal_bounds(x.numel(), comm.size)

    def job() -> None:
        lane = lane_of(to, comm)
        if lane.data_ptr() != x.data_ptr():
            lane.copy_(x)
        comm.all_gather_storage_(flat, storage, bounds)

    return [output], job


def reduce_scatter_single(comm: Any, output: Tensor, tensor: Tensor, opts: Any) -> Plan:
    """Reduce a tensor over all ranks and give each rank its part; the output may be a part of the input."""
    op, scale = reduction(opts.reduceOp, tensor.dtype)
    to, x = plain(output), plain(tensor).flat
    check_parts("reduce_scatter", x, to.flat, comm.size)

    def job() -> None:
        if scale == 1.0 and not overlap(to.flat, x):
            comm.reduce_scatter(x, op, out=to.flat)
        else:
            room = x.clone()
            comm.reduce_scatter_(room, equal_bounds(to.flat.numel(), comm.size), op, scale=scale)
            to.flat.copy_(lane_of(room, comm))
        to.write_back()

    return [output], job


def reduce_scatter_shared(comm: Any, output: Tensor, tensor: Tensor, storage: Storage, opts: Any) -> Plan:
    """`reduce_scatter_single` of a contiguous tensor in a storage that the other ranks can map."""
    op, scale = reduction(opts.reduceOp, tensor.dtype)
    to, x = plain(output), plain(tensor).flat
    if scale != 1.0 or not isinstance(comm, HostCommunicator):
        return reduce_scatter_single(comm, output, tensor, opts)
    check_parts("reduce_scatter", x, to.flat, comm.size)
    flat, bounds = flatten(x), equal_bounds(to.flat.numel(), comm.size)
    out = to.flat.data_ptr()
    call = CoreRequest("reduce_scatter", flat, flat.numel, bounds, out=out, op=checked_op(flat, op), keeps=to)

    def job() -> None:
        comm.execute(call, 0, True, storage)
        to.write_back()

    return [output], job


def all_to_all_single(
    comm: Any, output: Tensor, tensor: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any
) -> Plan:
    """Give part j of every rank's tensor to rank j: equal parts, or of as many rows as the splits say."""
    to, x = plain(output, moved=True), plain(tensor, moved=True).flat
    even = not out_splits and not in_splits
    takes, gives = parts_of(to.flat, output, out_splits, comm.size), parts_of(x, tensor, in_splits, comm.size)

    def job() -> None:
        if overlap(to.flat, x):
            raise UsageError("all_to_all: the output must not overlap the input")
        if even:
            comm.all_to_all(x, out=to.flat)
        else:
            exchange(comm, gives, takes)
        to.write_back()

    return [output], job


# ------------------------------------------------------------------------------------------------ several at once


def all_gather_coalesced(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """`all_gather_single` of several tensors."""
    pairs = zip(outputs, tensors, strict=True)
    return list(outputs), in_turn([all_gather_single(comm, out, x, opts)[1] for out, x in pairs])


def reduce_scatter_coalesced(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """`reduce_scatter_single` of several tensors."""
    pairs = zip(outputs, tensors, strict=True)
    return list(outputs), in_turn([reduce_scatter_single(comm, out, x, opts)[1] for out, x in pairs])


# What torch calls them, the newest name last, and the options they take. Every name becomes a method of the group.
TABLE: dict[Collective, tuple[Any, ...]] = {
    all_reduce: (c10d.AllreduceOptions, "allreduce_coalesced", "allreduce"),
    broadcast: (c10d.BroadcastOptions, "broadcast"),
    reduce: (c10d.ReduceOptions, "reduce"),
    barrier: (c10d.BarrierOptions, "barrier"),
    all_gather: (c10d.AllgatherOptions, "allgather"),
    all_gather_single: (c10d.AllgatherOptions, "_allgather_base", "all_gather_single"),
    all_gather_coalesced: (
        c10d.AllgatherOptions,
        "allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
    ),
    all_gather_lists: (c10d.AllgatherOptions, "allgather_coalesced"),
    reduce_scatter: (c10d.ReduceScatterOptions, "reduce_scatter"),
    reduce_scatter_single: (c10d.ReduceScatterOptions, "_reduce_scatter_base", "reduce_scatter_single"),
    reduce_scatter_coalesced: (
        c10d.ReduceScatterOptions,
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    gather: (c10d.GatherOptions, "gather"),
    scatter: (c10d.ScatterOptions, "scatter"),
    all_to_all: (c10d.AllToAllOptions, "alltoall"),
    all_to_all_single: (c10d.AllToAllOptions, "alltoall_base", "all_to_all_single"),
}

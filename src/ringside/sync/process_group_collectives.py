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

from ringside.engine import Communicator as HostCommunicator
from ringside.engine.calls import Call, checked_op, equal_bounds
from ringside.engine.regions import Storage
from ringside.engine.tensors import flatten
from ringside.errors import UsageError
from ringside.sync.process_group_exchange import exchange
from ringside.sync.process_group_posted import is_small
from ringside.sync.process_group_sparse import all_reduce_sparse
from ringside.sync.process_group_tensors import bounds_of, lay_out, overlap, plain, reduction

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Job = Callable[[], None]
Plan = tuple[list[Tensor], Job]
Collective = Callable[..., Plan]


def all_reduce(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """Reduce each tensor over all ranks, in place; sparse ones (COO) by sum or avg."""
    return list(tensors), _in_turn([_reduce_one(comm, tensor, opts.reduceOp) for tensor in tensors])


def _reduce_one(comm: Any, tensor: Tensor, wish: Any) -> Job:
    op, scale = reduction(wish, tensor.dtype)
    if tensor.layout == torch.sparse_coo:
        return lambda: all_reduce_sparse(comm, tensor, op)
    x = plain(tensor)
    algorithm = "one_shot" if is_small(comm, x.flat.nbytes) else None

    def job() -> None:
        comm.all_reduce(x.flat, op, scale=scale, algorithm=algorithm)
        x.write_back()

    return job


def begin_small(comm: Any, tensors: Tensors, opts: Any) -> Callable[[], Job] | None:
    """Return what begins a small all-reduce of one tensor, to be finished later; None where it is not that."""
    tensor = tensors[0]
    if len(tensors) != 1 or tensor.layout != torch.strided or not is_small(comm, tensor.nbytes):
        return None
    x = plain(tensor)
    if x.copy is not None:
        return None
    op, scale = reduction(opts.reduceOp, tensor.dtype)
    return lambda: comm.post(flatten(x.flat), op, scale=scale)


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
    _check_parts("all_gather", to.flat, x, comm.size)

    def job() -> None:
        if not overlap(to.flat, x):
            comm.all_gather(x, out=to.flat)
        else:
            _lane(to.flat, comm).copy_(x)
            comm.all_gather_(to.flat, equal_bounds(x.numel(), comm.size))
        to.write_back()

    return [output], job


def reduce_scatter_single(comm: Any, output: Tensor, tensor: Tensor, opts: Any) -> Plan:
    """Reduce a tensor over all ranks and give each rank its part; the output may be a part of the input."""
    op, scale = reduction(opts.reduceOp, tensor.dtype)
    to, x = plain(output), plain(tensor).flat
    _check_parts("reduce_scatter", x, to.flat, comm.size)

    def job() -> None:
        if scale == 1.0 and not overlap(to.flat, x):
            comm.reduce_scatter(x, op, out=to.flat)
        else:
            room = x.clone()
            comm.reduce_scatter_(room, equal_bounds(to.flat.numel(), comm.size), op, scale=scale)
            to.flat.copy_(_lane(room, comm))
        to.write_back()

    return [output], job


def reduce_scatter_shared(comm: Any, output: Tensor, tensor: Tensor, storage: Storage, opts: Any) -> Plan:
    """`reduce_scatter_single` of a contiguous tensor in a storage that the other ranks can map."""
    op, scale = reduction(opts.reduceOp, tensor.dtype)
    to, x = plain(output), plain(tensor).flat
    if scale != 1.0 or not isinstance(comm, HostCommunicator):
        return reduce_scatter_single(comm, output, tensor, opts)
    _check_parts("reduce_scatter", x, to.flat, comm.size)
    flat, bounds = flatten(x), equal_bounds(to.flat.numel(), comm.size)
    out = to.flat.data_ptr()
    call = Call("reduce_scatter", flat, flat.numel, bounds, out=out, op=checked_op(flat, op), keeps=to)

    def job() -> None:
        comm.carry(call, 0, True, storage)
        to.write_back()

    return [output], job


def all_to_all_single(
    comm: Any, output: Tensor, tensor: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any
) -> Plan:
    """Give part j of every rank's tensor to rank j: equal parts, or of as many rows as the splits say."""
    to, x = plain(output, moved=True), plain(tensor, moved=True).flat
    even = not out_splits and not in_splits
    takes, gives = _parts(to.flat, output, out_splits, comm.size), _parts(x, tensor, in_splits, comm.size)

    def job() -> None:
        if overlap(to.flat, x):
            raise UsageError("all_to_all: the output must not overlap the input")
        if even:
            comm.all_to_all(x, out=to.flat)
        else:
            exchange(comm, gives, takes)
        to.write_back()

    return [output], job


# ------------------------------------------------------------------------------------------------ lists of tensors


def all_gather(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """Give every rank the tensors of all ranks, each into a tensor of its own; sizes may differ by rank."""
    jobs = [_gather_one(comm, row, tensor) for row, tensor in zip(outputs, tensors, strict=True)]
    return [out for row in outputs for out in row], _in_turn(jobs)


def _gather_one(comm: Any, row: Tensors, tensor: Tensor) -> Job:
    _check_list("all_gather", row, comm.size)
    x, tos = plain(tensor, moved=True).flat, [plain(out, moved=True) for out in row]
    bounds = bounds_of([to.flat for to in tos])
    _check_own("all_gather", tos[comm.rank].flat, x, comm.rank)

    def job() -> None:
        room = x.new_empty(bounds[-1])
        room[bounds[comm.rank] : bounds[comm.rank + 1]] = x
        comm.all_gather_(room, bounds)
        lay_out(tos, room)

    return job


def reduce_scatter(comm: Any, outputs: Tensors, tensors: Sequence[Tensors], opts: Any) -> Plan:
    """Reduce lists of tensors over all ranks, tensor j into rank j's output; sizes may differ by rank."""
    jobs = [_scatter_one(comm, out, row, opts.reduceOp) for out, row in zip(outputs, tensors, strict=True)]
    return list(outputs), _in_turn(jobs)


def _scatter_one(comm: Any, output: Tensor, row: Tensors, wish: Any) -> Job:
    _check_list("reduce_scatter", row, comm.size)
    op, scale = reduction(wish, output.dtype)
    to, parts = plain(output), [plain(tensor).flat for tensor in row]
    bounds = bounds_of(parts)
    _check_own("reduce_scatter", parts[comm.rank], to.flat, comm.rank)

    def job() -> None:
        room = torch.cat(parts)
        comm.reduce_scatter_(room, bounds, op, scale=scale)
        lay_out([to], room[bounds[comm.rank] : bounds[comm.rank + 1]])

    return job


def gather(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """Give rank `opts.rootRank` the tensors of all ranks, of equal size."""
    row: list[Tensor] = []
    if comm.rank == opts.rootRank:
        row = list(outputs[0])
        _check_list("gather", row, comm.size)
    x, tos = plain(tensors[0], moved=True).flat, [plain(out, moved=True) for out in row]
    for to in tos:
        _check_own("gather", to.flat, x, comm.rank)

    def job() -> None:
        room = comm.gather(x, opts.rootRank)
        if room is not None:
            lay_out(tos, room.view(-1))

    return row, job


def scatter(comm: Any, outputs: Tensors, tensors: Sequence[Tensors], opts: Any) -> Plan:
    """Give every rank one of the tensors of rank `opts.rootRank`, of equal size."""
    row: list[Tensor] = []
    if comm.rank == opts.rootRank:
        row = [plain(tensor, moved=True).flat for tensor in tensors[0]]
        _check_list("scatter", row, comm.size)
    to = plain(outputs[0], moved=True)
    for part in row:
        _check_own("scatter", part, to.flat, comm.rank)

    def job() -> None:
        comm.scatter(to.flat, torch.stack(row) if row else None, opts.rootRank)
        to.write_back()

    return [outputs[0]], job


def all_to_all(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """Give tensor j of every rank to rank j; all sizes may differ."""
    for each in (outputs, tensors):
        _check_list("all_to_all", each, comm.size)
    tos, xs = [plain(out, moved=True) for out in outputs], [plain(tensor, moved=True).flat for tensor in tensors]

    def job() -> None:
        exchange(comm, xs, [to.flat for to in tos])
        for to in tos:
            to.write_back()

    return list(outputs), job


# ------------------------------------------------------------------------------------------------ several at once


def all_gather_coalesced(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """`all_gather_single` of several tensors."""
    pairs = zip(outputs, tensors, strict=True)
    return list(outputs), _in_turn([all_gather_single(comm, out, x, opts)[1] for out, x in pairs])


def reduce_scatter_coalesced(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """`reduce_scatter_single` of several tensors."""
    pairs = zip(outputs, tensors, strict=True)
    return list(outputs), _in_turn([reduce_scatter_single(comm, out, x, opts)[1] for out, x in pairs])


def all_gather_lists(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """`all_gather` of several tensors, with a list of all of them for every rank."""
    return all_gather(comm, list(zip(*outputs, strict=True)), tensors, opts)


# What torch calls them, the newest name last, and the options they take.
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


# ------------------------------------------------------------------------------------------------ inside


def _in_turn(jobs: list[Job]) -> Job:
    if len(jobs) == 1:
        return jobs[0]

    def job() -> None:
        for each in jobs:
            each()

    return job


def _lane(flat: Tensor, comm: Any) -> Tensor:
    """Return this rank's part of equal parts."""
    part = flat.numel() // comm.size
    return flat[part * comm.rank : part * (comm.rank + 1)]


def _parts(flat: Tensor, tensor: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
    """Return the parts of a flat tensor: of as many rows as `splits` says, or equal ones."""
    rows = tensor.shape[0] if tensor.dim() else 0
    splits = list(splits) or ([rows // ranks] * ranks if rows % ranks == 0 else [])
    if len(splits) != ranks or sum(splits) != rows:
        raise UsageError(
            f"all_to_all: {rows} rows cannot be divided among {ranks} ranks by the splits {splits}: "
            "give one number of rows per rank that sum up to all rows, or make the rows a multiple of the ranks"
        )
    row = flat.numel() // max(rows, 1)
    return list(torch.split_with_sizes(flat, [rows_of_one * row for rows_of_one in splits]))


def _check_parts(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise UsageError(
            f"{name}: the whole must be {ranks} times a rank's part, of the same dtype, not {whole.dtype} of "
            f"{whole.numel()} elements for {part.dtype} of {part.numel()}"
        )


def _check_list(name: str, row: Sequence[Any], ranks: int) -> None:
    if len(row) != ranks:
        raise UsageError(f"{name}: a list of tensors needs one for each of the {ranks} ranks, not {len(row)}")


def _check_own(name: str, entry: Tensor, own: Tensor, rank: int) -> None:
    if (entry.numel(), entry.dtype) != (own.numel(), own.dtype):
        raise UsageError(
            f"{name} on rank {rank}: the list has {entry.dtype} of {entry.numel()} elements where the tensor is "
            f"{own.dtype} of {own.numel()}"
        )

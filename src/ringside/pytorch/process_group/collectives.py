"""What every collective of torch.distributed is in terms of a communicator.

Each is a generator, which takes the communicator, then tensors and options as torch's process groups take them. Up to
its `yield` it checks them; it yields the tensors that will hold the result; what follows fills them, when it is the
collective's turn. Nothing is sent before that. Gloo wants contiguous tensors of equal sizes; these take any strides
and, in lists, sizes that differ by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ringside.engine import HostCommunicator
from ringside.engine.buffers import Flat, flatten
from ringside.engine.dtypes import ITEM_BYTES, dtype_code
from ringside.engine.request import CoreRequest, checked_op, equal_bounds
from ringside.engine.shm.memory import Storage
from ringside.errors import MismatchError, UnsupportedError, UsageError
from ringside.pytorch.process_group.arguments import (
    ENGINES_OWN,
    bounds_of,
    check_lengths,
    check_list,
    check_lists_of_root,
    check_own,
    check_parts,
    check_root,
    check_single,
    is_plain,
    is_premultiplied,
    lane_of,
    lay_out,
    overlap,
    parts_of,
    plain,
    reduction,
)
from ringside.text import name_ranks

# -------------------------------------------------------------------------------------------------
# Small all-reduces and all-gathers of the process group inside a host, which are started at the call.
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
Plan = Generator[list[Tensor], None, None]
Collective = Callable[..., Plan]


def together(outputs: Tensors, parts: Sequence[Plan]) -> Plan:
    """Several collectives as one: all are checked before the first is run."""
    for part in parts:
        next(part)
    yield list(outputs)
    for part in parts:
        next(part, None)


def all_reduce(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """Reduce a tensor over all ranks, in place; a sparse one (COO) by sum or avg."""
    check_single("all_reduce", tensors)
    return _all_reduce_one(comm, tensors[0], opts.reduceOp)


def all_reduce_coalesced(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """`all_reduce` of several tensors, each by itself."""
    return together(tensors, [_all_reduce_one(comm, tensor, opts.reduceOp) for tensor in tensors])


def _all_reduce_one(comm: Any, tensor: Tensor, reduce_op: Any) -> Plan:
    op, scale = reduction(reduce_op, tensor.dtype)
    if tensor.layout == torch.sparse_coo:
        yield [tensor]
        all_reduce_sparse(comm, tensor, op)
        return
    x = plain(tensor)
    algorithm = "one_shot" if is_one_shot(comm, x.flat.nbytes) else None
    yield [tensor]
    comm.all_reduce(x.flat, op, scale=scale, algorithm=algorithm)
    x.write_back()


Posted = tuple[Callable[..., Callable[[], None] | None], tuple[Any, ...]]
"""What begins a small collective at the call, and its arguments."""

_codes: dict[tuple[Any, Any], tuple[int, int, int]] = {}


def small_all_reduce(comm: HostCommunicator, tensors: Tensors, opts: Any) -> Posted | None:
    """Return what a host's communicator posts for an all-reduce of one small tensor; None where it is not that."""
    if len(tensors) != 1:
        return None
    tensor = tensors[0]
    if not tensor.is_cpu or tensor.layout is not torch.strided or not is_plain(tensor):
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
    return comm.post, (Flat(tensor.data_ptr(), numel, dtype, (numel,), tensor), max(code, 0), scale)


def broadcast(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """Copy the tensor of rank `opts.rootRank` to all ranks."""
    check_single("broadcast", tensors)
    check_root("broadcast", opts.rootRank, comm.size)
    x = plain(tensors[0], moved=True)
    yield list(tensors)
    comm.broadcast(x.flat, opts.rootRank)
    x.write_back()


def reduce(comm: Any, tensors: Tensors, opts: Any) -> Plan:
    """Reduce a tensor over all ranks into that of rank `opts.rootRank`; the others' stay as they are."""
    check_single("reduce", tensors)
    check_root("reduce", opts.rootRank, comm.size)
    op, scale = reduction(opts.reduceOp, tensors[0].dtype)
    if scale != 1.0:
        raise UsageError("reduce takes no factor: multiply the tensor first, or use all_reduce")
    x = plain(tensors[0])
    yield list(tensors)
    comm.reduce(x.flat, opts.rootRank, op)
    x.write_back()


def barrier(comm: Any, opts: Any) -> Plan:
    """Finish when every rank has called it."""
    yield []
    comm.barrier()


# ------------------------------------------------------------------------------------------------ one tensor for all


def all_gather_single(comm: Any, output: Tensor, tensor: Tensor, opts: Any) -> Plan:
    """Give every rank the tensors of all ranks one after the other; the input may be this rank's part of the output."""
    to, x = plain(output, moved=True), plain(tensor, moved=True).flat
    check_parts("all_gather", to.flat, x, comm.size)
    yield [output]
    if not overlap(to.flat, x):
        comm.all_gather(x, out=to.flat)
    else:
        lane_of(to.flat, comm).copy_(x)
        comm.all_gather_(to.flat, equal_bounds(x.numel(), comm.size))
    to.write_back()


def small_all_gather(comm: HostCommunicator, output: Tensor, tensor: Tensor, opts: Any) -> Posted | None:
    """Return what a host's communicator posts for an `all_gather_single` of few bytes; None where it is not that."""
    dtype, numel, total = tensor.dtype, tensor.numel(), output.numel()
    if dtype not in ENGINES_OWN or total != numel * comm.size:
        return None
    for each in (tensor, output):
        if not each.is_cpu or each.layout is not torch.strided or each.dtype is not dtype or not is_plain(each):
            return None
    if output.nbytes > comm.settings.one_shot_bytes or overlap(output, tensor):
        return None
    code = dtype_code(dtype)
    flat = Flat(tensor.data_ptr(), numel, code, (numel,), tensor)
    return comm.post_all_gather, (flat, Flat(output.data_ptr(), total, code, (total,), output))


def all_gather_shared(comm: Any, output: Tensor, tensor: Tensor, storage: Storage, opts: Any) -> Plan:
    """`all_gather_single` into a contiguous tensor in a storage that the other ranks can map."""
    to, x = plain(output, moved=True).flat, plain(tensor, moved=True).flat
    if not isinstance(comm, HostCommunicator):
        yield from all_gather_single(comm, output, tensor, opts)
        return
    check_parts("all_gather", to, x, comm.size)
    flat, bounds = flatten(to), equal_bounds(x.numel(), comm.size)
    yield [output]
    lane = lane_of(to, comm)
    if lane.data_ptr() != x.data_ptr():
        lane.copy_(x)
    comm.all_gather_storage_(flat, storage, bounds)


def reduce_scatter_single(comm: Any, output: Tensor, tensor: Tensor, opts: Any) -> Plan:
    """Reduce a tensor over all ranks and give each rank its part; the output may be a part of the input."""
    op, scale = reduction(opts.reduceOp, tensor.dtype)
    to, x = plain(output), plain(tensor).flat
    check_parts("reduce_scatter", x, to.flat, comm.size)
    yield [output]
    if scale == 1.0 and not overlap(to.flat, x):
        comm.reduce_scatter(x, op, out=to.flat)
    else:
        room = x.clone()
        comm.reduce_scatter_(room, equal_bounds(to.flat.numel(), comm.size), op, scale=scale)
        to.flat.copy_(lane_of(room, comm))
    to.write_back()


def reduce_scatter_shared(comm: Any, output: Tensor, tensor: Tensor, storage: Storage, opts: Any) -> Plan:
    """`reduce_scatter_single` of a contiguous tensor in a storage that the other ranks can map."""
    op, scale = reduction(opts.reduceOp, tensor.dtype)
    to, x = plain(output), plain(tensor).flat
    if scale != 1.0 or not isinstance(comm, HostCommunicator):
        yield from reduce_scatter_single(comm, output, tensor, opts)
        return
    check_parts("reduce_scatter", x, to.flat, comm.size)
    flat, bounds = flatten(x), equal_bounds(to.flat.numel(), comm.size)
    out = to.flat.data_ptr()
    call = CoreRequest("reduce_scatter", flat, flat.numel, bounds, out=out, op=checked_op(flat, op), keeps=to)
    yield [output]
    comm.execute(call, 0, True, storage)
    to.write_back()


def all_to_all_single(
    comm: Any, output: Tensor, tensor: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], opts: Any
) -> Plan:
    """Give part j of every rank's tensor to rank j: equal parts, or of as many rows as the splits say."""
    to, x = plain(output, moved=True), plain(tensor, moved=True).flat
    even = not out_splits and not in_splits
    takes, gives = parts_of(to.flat, output, out_splits, comm.size), parts_of(x, tensor, in_splits, comm.size)
    if overlap(to.flat, x):
        raise UsageError("all_to_all: the output must not overlap the input")
    yield [output]
    if even:
        comm.all_to_all(x, out=to.flat)
    else:
        exchange(comm, gives, takes)
    to.write_back()


def gather_single(comm: Any, output: Tensor, tensor: Tensor, opts: Any) -> Plan:
    """Give rank `opts.rootRank` the tensors of all ranks in one (torch 2.15); the others' output is not used."""
    is_root = comm.rank == opts.rootRank
    x, to = plain(tensor, moved=True).flat, plain(output, moved=True)
    if is_root:
        check_parts("gather", to.flat, x, comm.size)
    yield [output] if is_root else []
    room = comm.gather(x, opts.rootRank)
    if room is not None:
        lay_out([to], room.view(-1))


# ------------------------------------------------------------------------------------------------ several at once


def all_gather_coalesced(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """`all_gather_single` of several tensors."""
    pairs = zip(outputs, tensors, strict=True)
    return together(outputs, [all_gather_single(comm, out, x, opts) for out, x in pairs])


def reduce_scatter_coalesced(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """`reduce_scatter_single` of several tensors."""
    pairs = zip(outputs, tensors, strict=True)
    return together(outputs, [reduce_scatter_single(comm, out, x, opts) for out, x in pairs])


# -------------------------------------------------------------------------------------------------
# Lists of tensors, one for every rank. Gloo wants equal sizes; here they may differ by rank, but for `gather` and
# `scatter`.


def all_gather(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """Give every rank the tensors of all ranks, each into a tensor of its own; sizes may differ by rank."""
    check_lengths("all_gather", outputs, tensors)
    parts = [_all_gather_one(comm, row, tensor) for row, tensor in zip(outputs, tensors, strict=True)]
    return together([out for row in outputs for out in row], parts)


def _all_gather_one(comm: Any, row: Tensors, tensor: Tensor) -> Plan:
    check_list("all_gather: invalid output tensor list", row, comm.size)
    x, tos = plain(tensor, moved=True).flat, [plain(out, moved=True) for out in row]
    bounds = bounds_of([to.flat for to in tos])
    check_own("all_gather", tos[comm.rank].flat, x, comm.rank)
    yield list(row)
    room = x.new_empty(bounds[-1])
    room[bounds[comm.rank] : bounds[comm.rank + 1]] = x
    comm.all_gather_(room, bounds)
    lay_out(tos, room)


def reduce_scatter(comm: Any, outputs: Tensors, tensors: Sequence[Tensors], opts: Any) -> Plan:
    """Reduce lists of tensors over all ranks, tensor j into rank j's output; sizes may differ by rank."""
    check_lengths("reduce_scatter", outputs, tensors)
    parts = [_reduce_scatter_one(comm, out, row, opts.reduceOp) for out, row in zip(outputs, tensors, strict=True)]
    return together(outputs, parts)


def _reduce_scatter_one(comm: Any, output: Tensor, row: Tensors, reduce_op: Any) -> Plan:
    check_list("reduce_scatter: invalid input tensor list size, must be world size", row, comm.size)
    op, scale = reduction(reduce_op, output.dtype)
    to, parts = plain(output), [plain(tensor).flat for tensor in row]
    bounds = bounds_of(parts)
    check_own("reduce_scatter", parts[comm.rank], to.flat, comm.rank)
    yield [output]
    room = torch.cat(parts)
    comm.reduce_scatter_(room, bounds, op, scale=scale)
    lay_out([to], room[bounds[comm.rank] : bounds[comm.rank + 1]])


def gather(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """Give rank `opts.rootRank` the tensors of all ranks, of equal size."""
    check_single("gather", tensors, "input tensor list")
    check_root("gather", opts.rootRank, comm.size)
    is_root = comm.rank == opts.rootRank
    check_lists_of_root("gather", outputs, is_root, comm.size, "output")
    row = list(outputs[0]) if is_root else []
    x, tos = plain(tensors[0], moved=True).flat, [plain(out, moved=True) for out in row]
    for to in tos:
        check_own("gather", to.flat, x, comm.rank)
    yield row
    room = comm.gather(x, opts.rootRank)
    if room is not None:
        lay_out(tos, room.view(-1))


def scatter(comm: Any, outputs: Tensors, tensors: Sequence[Tensors], opts: Any) -> Plan:
    """Give every rank one of the tensors of rank `opts.rootRank`, of equal size."""
    check_single("scatter", outputs, "output tensor list")
    check_root("scatter", opts.rootRank, comm.size)
    is_root = comm.rank == opts.rootRank
    check_lists_of_root("scatter", tensors, is_root, comm.size, "input")
    row = [plain(tensor, moved=True).flat for tensor in tensors[0]] if is_root else []
    to = plain(outputs[0], moved=True)
    for part in row:
        check_own("scatter", part, to.flat, comm.rank)
    yield [outputs[0]]
    comm.scatter(to.flat, torch.stack(row) if row else None, opts.rootRank)
    to.write_back()


def all_to_all(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """Give tensor j of every rank to rank j; all sizes may differ."""
    for side, each in (("input", tensors), ("output", outputs)):
        words = f"all_to_all: {side} tensor list size {len(each)} does not match world size {comm.size}"
        check_list(words, each, comm.size)
    tos, xs = [plain(out, moved=True) for out in outputs], [plain(tensor, moved=True).flat for tensor in tensors]
    yield list(outputs)
    exchange(comm, xs, [to.flat for to in tos])
    for to in tos:
        to.write_back()


def all_gather_lists(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """`all_gather` of several tensors, with a list of all of them for every rank."""
    return all_gather(comm, list(zip(*outputs, strict=True)), tensors, opts)


# -------------------------------------------------------------------------------------------------
# All-to-all of parts whose sizes differ, in blocks of equal size: no rank needs more room than a block per rank.

BLOCK_BYTES = 1 << 20


def exchange(comm: Any, gives: Sequence[torch.Tensor], takes: Sequence[torch.Tensor]) -> None:
    """Give part j to rank j, and take what every rank has for this one.

    Args:
        comm: The communicator.
        gives: A flat tensor per rank.
        takes: A flat tensor per rank, of the same dtype, to write into.

    Raises:
        MismatchError: Two ranks do not mean the same sizes; on all ranks alike, before anything is sent.
    """
    own = torch.tensor([[[x.numel() for x in gives], [x.numel() for x in takes]]])
    sizes = comm.all_gather(own).tolist()
    for giver in range(comm.size):
        for taker in range(comm.size):
            given, taken = sizes[giver][0][taker], sizes[taker][1][giver]
            if given != taken:
                raise MismatchError(
                    f"all_to_all: rank {giver} gives {given} elements to rank {taker}, which expects {taken}: "
                    "make the splits of both alike",
                    [giver, taker],
                )
    longest = max(int(size) for row in sizes for size in row[0])
    block = min(longest, max(BLOCK_BYTES // gives[0].element_size(), 1))
    there, back = gives[0].new_empty(2, comm.size, block)
    for offset in range(0, longest, max(block, 1)):
        for row, give in zip(there, gives, strict=True):
            part = give[offset : offset + block]
            row[: part.numel()] = part
        comm.all_to_all(there, out=back)
        for row, take in zip(back, takes, strict=True):
            part = take[offset : offset + block]
            part.copy_(row[: part.numel()])


# -------------------------------------------------------------------------------------------------
# Sums of sparse tensors (COO): every rank gathers the entries of all and adds them up.


def all_reduce_sparse(comm: Any, tensor: torch.Tensor, op: str) -> None:
    """Sum a sparse tensor over all ranks, in place; entries are added in rank order, so the sum is alike everywhere.

    Args:
        comm: The communicator.
        tensor: COO, of equal shape and sparse dimensions on all ranks; numbers of entries may differ.
        op: sum or avg.

    Raises:
        UnsupportedError: Another reduction: what is not stored counts as 0, so only sums are cheap.
        MismatchError: Shapes differ.
    """
    if op not in ("sum", "avg"):
        raise UnsupportedError(
            f"unsupported reduction operation: {op} of sparse tensors is not defined, sum and avg are; "
            "or call .to_dense() first"
        )
    own = tensor.detach().coalesce()

    # How many entries each rank has; shapes that differ are refused.
    shape = [*own.shape, *[-1] * (8 - own.dim())]
    rows = comm.all_gather(torch.tensor([[own._nnz(), own.sparse_dim(), *shape]])).tolist()
    different = [rank for rank, row in enumerate(rows) if row[1:] != rows[0][1:]]
    if different:
        names = name_ranks(different)
        raise MismatchError(f"all_reduce: {names} and rank 0 have sparse tensors of different shapes", different)
    counts = [row[0] for row in rows]

    indices = _gathered(comm, own.indices().t(), counts)
    values = _gathered(comm, own.values(), counts)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
    if op == "avg":
        total = torch.sparse_coo_tensor(total.indices(), total.values() / comm.size, tensor.shape, is_coalesced=True)
    with torch.no_grad():
        tensor.copy_(total)


def _gathered(comm: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return all ranks' rows one after the other; `counts` is how many each rank has."""
    everything = rows.new_empty((sum(counts), *rows.shape[1:]))
    width = rows[:1].numel() if len(rows) else everything[:1].numel()
    ends = [sum(counts[:rank]) for rank in range(comm.size + 1)]
    everything[ends[comm.rank] : ends[comm.rank + 1]] = rows
    flat = plain(everything, moved=True).flat
    item = flat.numel() // max(everything.numel(), 1)
    comm.all_gather_(flat, [end * width * item for end in ends])
    return everything


# -------------------------------------------------------------------------------------------------
# The collectives of a process group.

TABLE: dict[Collective, tuple[Any, ...]] = {
    all_reduce: (c10d.AllreduceOptions, "allreduce"),
    all_reduce_coalesced: (c10d.AllreduceOptions, "allreduce_coalesced"),
    broadcast: (c10d.BroadcastOptions, "broadcast"),
    reduce: (c10d.ReduceOptions, "reduce"),
    barrier: (c10d.BarrierOptions, "barrier"),
    all_gather_single: (c10d.AllgatherOptions, "_allgather_base", "all_gather_single"),
    reduce_scatter_single: (c10d.ReduceScatterOptions, "_reduce_scatter_base", "reduce_scatter_single"),
    all_to_all_single: (c10d.AllToAllOptions, "alltoall_base", "all_to_all_single"),
    gather_single: (c10d.GatherOptions, "gather_into_tensor", "gather_single"),
    all_gather_coalesced: (c10d.AllgatherOptions, "allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    reduce_scatter_coalesced: (
        c10d.ReduceScatterOptions,
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
    ),
    all_gather: (c10d.AllgatherOptions, "allgather"),
    reduce_scatter: (c10d.ReduceScatterOptions, "reduce_scatter"),
    gather: (c10d.GatherOptions, "gather"),
    scatter: (c10d.ScatterOptions, "scatter"),
    all_to_all: (c10d.AllToAllOptions, "alltoall"),
    all_gather_lists: (c10d.AllgatherOptions, "allgather_coalesced"),
}
"""Of each: the options that it takes, and what torch calls it, the newest name last. Each is a method of the group."""

SMALL: dict[Collective, Callable[..., Posted | None]] = {
    all_reduce: small_all_reduce,
    all_gather_single: small_all_gather,
}
"""Those that tensor parallelism and serving wait for at small sizes, in code that leaves the caches cold."""

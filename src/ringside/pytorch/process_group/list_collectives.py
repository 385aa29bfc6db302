"""Collectives of lists of tensors, one for every rank, in terms of a communicator; see `process_group_collectives`.

Gloo wants equal sizes; here they may differ by rank, but for `gather` and `scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringside.errors import MismatchError, UnsupportedError
from ringside.pytorch.process_group.arguments import check_list, check_own, in_turn
from ringside.pytorch.process_group.tensors import bounds_of, lay_out, plain, reduction
from ringside.text import name_ranks

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
    longest = _agree_on_longest(comm, [x.numel() for x in gives], [x.numel() for x in takes])
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


def _agree_on_longest(comm: Any, gives: list[int], takes: list[int]) -> int:
    """Return the size of the largest part there is, in elements."""
    sizes = comm.all_gather(torch.tensor([[gives, takes]])).tolist()
    for giver in range(comm.size):
        for taker in range(comm.size):
            given, taken = sizes[giver][0][taker], sizes[taker][1][giver]
            if given != taken:
                raise MismatchError(
                    f"all_to_all: rank {giver} gives {given} elements to rank {taker}, which expects {taken}: "
                    "make the splits of both alike",
                    [giver, taker],
                )
    return max(int(size) for row in sizes for size in row[0])


Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Job = Callable[[], None]
Plan = tuple[list[Tensor], Job]


def all_gather(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """Give every rank the tensors of all ranks, each into a tensor of its own; sizes may differ by rank."""
    jobs = [_all_gather_job(comm, row, tensor) for row, tensor in zip(outputs, tensors, strict=True)]
    return [out for row in outputs for out in row], in_turn(jobs)


def _all_gather_job(comm: Any, row: Tensors, tensor: Tensor) -> Job:
    check_list("all_gather", row, comm.size)
    x, tos = plain(tensor, moved=True).flat, [plain(out, moved=True) for out in row]
    bounds = bounds_of([to.flat for to in tos])
    check_own("all_gather", tos[comm.rank].flat, x, comm.rank)

    def job() -> None:
        room = x.new_empty(bounds[-1])
        room[bounds[comm.rank] : bounds[comm.rank + 1]] = x
        comm.all_gather_(room, bounds)
        lay_out(tos, room)

    return job


def reduce_scatter(comm: Any, outputs: Tensors, tensors: Sequence[Tensors], opts: Any) -> Plan:
    """Reduce lists of tensors over all ranks, tensor j into rank j's output; sizes may differ by rank."""
    jobs = [_reduce_scatter_job(comm, out, row, opts.reduceOp) for out, row in zip(outputs, tensors, strict=True)]
    return list(outputs), in_turn(jobs)


def _reduce_scatter_job(comm: Any, output: Tensor, row: Tensors, reduce_op: Any) -> Job:
    check_list("reduce_scatter", row, comm.size)
    op, scale = reduction(reduce_op, output.dtype)
    to, parts = plain(output), [plain(tensor).flat for tensor in row]
    bounds = bounds_of(parts)
    check_own("reduce_scatter", parts[comm.rank], to.flat, comm.rank)

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
        check_list("gather", row, comm.size)
    x, tos = plain(tensors[0], moved=True).flat, [plain(out, moved=True) for out in row]
    for to in tos:
        check_own("gather", to.flat, x, comm.rank)

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
        check_list("scatter", row, comm.size)
    to = plain(outputs[0], moved=True)
    for part in row:
        check_own("scatter", part, to.flat, comm.rank)

    def job() -> None:
        comm.scatter(to.flat, torch.stack(row) if row else None, opts.rootRank)
        to.write_back()

    return [outputs[0]], job


def all_to_all(comm: Any, outputs: Tensors, tensors: Tensors, opts: Any) -> Plan:
    """Give tensor j of every rank to rank j; all sizes may differ."""
    for each in (outputs, tensors):
        check_list("all_to_all", each, comm.size)
    tos, xs = [plain(out, moved=True) for out in outputs], [plain(tensor, moved=True).flat for tensor in tensors]

    def job() -> None:
        exchange(comm, xs, [to.flat for to in tos])
        for to in tos:
            to.write_back()

    return list(outputs), job


def all_gather_lists(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """`all_gather` of several tensors, with a list of all of them for every rank."""
    return all_gather(comm, list(zip(*outputs, strict=True)), tensors, opts)


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
        raise UnsupportedError(f"{op} of sparse tensors is not defined: sum and avg are; or call .to_dense() first")
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

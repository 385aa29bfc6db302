"""Collectives of lists of tensors, one for every rank, in terms of a communicator; see `process_group_collectives`.

Gloo wants equal sizes; here they may differ by rank, but for `gather` and `scatter`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringside.sync.process_group_checks import check_list, check_own, in_turn
from ringside.sync.process_group_exchange import exchange
from ringside.sync.process_group_tensors import bounds_of, lay_out, plain, reduction

Tensor = torch.Tensor
Tensors = Sequence[Tensor]
Job = Callable[[], None]
Plan = tuple[list[Tensor], Job]


def all_gather(comm: Any, outputs: Sequence[Tensors], tensors: Tensors, opts: Any) -> Plan:
    """Give every rank the tensors of all ranks, each into a tensor of its own; sizes may differ by rank."""
    jobs = [_gather_one(comm, row, tensor) for row, tensor in zip(outputs, tensors, strict=True)]
    return [out for row in outputs for out in row], in_turn(jobs)


def _gather_one(comm: Any, row: Tensors, tensor: Tensor) -> Job:
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
    jobs = [_scatter_one(comm, out, row, opts.reduceOp) for out, row in zip(outputs, tensors, strict=True)]
    return list(outputs), in_turn(jobs)


def _scatter_one(comm: Any, output: Tensor, row: Tensors, wish: Any) -> Job:
    check_list("reduce_scatter", row, comm.size)
    op, scale = reduction(wish, output.dtype)
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

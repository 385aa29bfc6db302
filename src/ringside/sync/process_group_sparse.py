"""Sums of sparse tensors (COO): every rank gathers everybody's entries and adds them up."""

from __future__ import annotations

from typing import Any

import torch

from ringside.engine.failures import name_ranks
from ringside.errors import MismatchError, UnsupportedError
from ringside.sync.process_group_tensors import plain


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
    counts = _counts(comm, own)
    indices = _gathered(comm, own.indices().t(), counts)
    values = _gathered(comm, own.values(), counts)
    total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape).coalesce()
    if op == "avg":
        total = torch.sparse_coo_tensor(total.indices(), total.values() / comm.size, tensor.shape, is_coalesced=True)
    with torch.no_grad():
        tensor.copy_(total)


def _counts(comm: Any, own: torch.Tensor) -> list[int]:
    """Return how many entries each rank has; refuse shapes that differ."""
    shape = [*own.shape, *[-1] * (8 - own.dim())]
    rows = comm.all_gather(torch.tensor([[own._nnz(), own.sparse_dim(), *shape]])).tolist()
    different = [rank for rank, row in enumerate(rows) if row[1:] != rows[0][1:]]
    if different:
        names = name_ranks(different)
        raise MismatchError(f"all_reduce: {names} and rank 0 have sparse tensors of different shapes", different)
    return [row[0] for row in rows]


def _gathered(comm: Any, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return everybody's rows one after the other; `counts` says how many each rank has."""
    everything = rows.new_empty((sum(counts), *rows.shape[1:]))
    width = rows[:1].numel() if len(rows) else everything[:1].numel()
    ends = [sum(counts[:rank]) for rank in range(comm.size + 1)]
    everything[ends[comm.rank] : ends[comm.rank + 1]] = rows
    flat = plain(everything, moved=True).flat
    item = flat.numel() // max(everything.numel(), 1)
    comm.all_gather_(flat, [end * width * item for end in ends])
    return everything

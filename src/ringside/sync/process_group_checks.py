"""What collectives ask of their tensors before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ringside.errors import UsageError

Tensor = torch.Tensor
Job = Callable[[], None]


def in_turn(jobs: list[Job]) -> Job:
    """Return one job that does several, one after the other."""
    if len(jobs) == 1:
        return jobs[0]

    def job() -> None:
        for each in jobs:
            each()

    return job


def lane_of(flat: Tensor, comm: Any) -> Tensor:
    """Return this rank's part of equal parts."""
    part = flat.numel() // comm.size
    return flat[part * comm.rank : part * (comm.rank + 1)]


def parts_of(flat: Tensor, tensor: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
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


def check_parts(name: str, whole: Tensor, part: Tensor, ranks: int) -> None:
    """Refuse a whole that is not as large as all parts together."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise UsageError(
            f"{name}: the whole must be {ranks} times a rank's part, of the same dtype, not {whole.dtype} of "
            f"{whole.numel()} elements for {part.dtype} of {part.numel()}"
        )


def check_list(name: str, row: Sequence[Any], ranks: int) -> None:
    """Refuse a list that has not a tensor for every rank."""
    if len(row) != ranks:
        raise UsageError(f"{name}: a list of tensors needs one for each of the {ranks} ranks, not {len(row)}")


def check_own(name: str, entry: Tensor, own: Tensor, rank: int) -> None:
    """Refuse an entry of a list that does not fit this rank's own tensor."""
    if (entry.numel(), entry.dtype) != (own.numel(), own.dtype):
        raise UsageError(
            f"{name} on rank {rank}: the list has {entry.dtype} of {entry.numel()} elements where the tensor is "
            f"{own.dtype} of {own.numel()}"
        )

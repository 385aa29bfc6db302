"""Tensors of the process group as the engine takes them: one dimension, contiguous, of numbers it can add up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import ReduceOp

from ringside.engine.dtypes import DTYPES
from ringside.errors import UnsupportedError

_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_ENGINES_OWN = frozenset(getattr(torch, name) for name in DTYPES)


class Plain(NamedTuple):
    """A tensor to be worked on in place.

    Args:
        flat: [numel], contiguous; for complex numbers [2 * numel], real and imaginary parts in turn.
        copy: What `flat` shows, where that is a copy of the caller's tensor.
        original: The caller's tensor of which `copy` is one.
    """

    flat: torch.Tensor
    copy: torch.Tensor | None = None
    original: torch.Tensor | None = None

    def write_back(self) -> None:
        """Copy the result into the caller's tensor, where `flat` is not that itself."""
        if self.original is not None and self.copy is not None:
            self.original.copy_(self.copy)


def plain(tensor: torch.Tensor, *, moved: bool = False) -> Plain:
    """Return a dense tensor as the engine takes it; what is not contiguous, or only marked as conjugated, is copied.

    Args:
        tensor: Any dense CPU tensor.
        moved: Its elements are only moved: those of a dtype that the engine does not know are taken as bytes.

    Raises:
        UnsupportedError: It is sparse.
    """
    if tensor.layout != torch.strided:
        raise UnsupportedError(f"only all_reduce takes tensors of layout {tensor.layout}: call .to_dense() first")
    tensor = tensor.detach()
    if is_plain(tensor):
        return Plain(_flat(tensor, moved))
    copy = tensor.resolve_conj().resolve_neg().contiguous()
    return Plain(_flat(copy, moved), copy, tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a dense tensor's memory holds its elements, in order and as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _flat(tensor: torch.Tensor, moved: bool) -> torch.Tensor:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)
    return flat.view(torch.uint8) if moved and flat.dtype not in _ENGINES_OWN else flat


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two contiguous tensors have bytes in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def bounds_of(parts: Sequence[torch.Tensor]) -> list[int]:
    """Return where parts that lie one after the other begin, and where the last one ends, in elements."""
    return [0, *accumulate(part.numel() for part in parts)]


def lay_out(parts: Sequence[Plain], room: torch.Tensor) -> None:
    """Copy what lies one after the other into tensors of their own.

    Args:
        parts: The tensors.
        room: [sum of their numels].
    """
    bounds = bounds_of([part.flat for part in parts])
    for part, begin, end in zip(parts, bounds, bounds[1:], strict=False):
        part.flat.copy_(room[begin:end])
        part.write_back()


def is_premultiplied(op: Any) -> bool:
    """Tell whether a `ReduceOp` is a sum with a factor (PREMUL_SUM)."""
    return getattr(op, "op", op) not in _OPS


def reduction(op: Any, dtype: torch.dtype) -> tuple[str, float]:
    """Return the engine's name of a reduction, and what to multiply every contribution with.

    Args:
        op: A `ReduceOp`.
        dtype: Of the tensors.

    Raises:
        UnsupportedError: There is no such reduction of this dtype.
    """
    if is_premultiplied(op):
        return "sum", float(op.__getstate__()[1])
    name = _OPS[getattr(op, "op", op)]
    if name not in ("sum", "avg") and dtype.is_complex:
        raise UnsupportedError(f"{name} of complex numbers is not defined here: sum and avg are")
    return name, 1.0

"""What a call of a process group's method says, and its tensors as the engine takes them.

torch gives most methods two signatures, with and without options: either lists of tensors and options
(`group.allreduce([x], opts)`), or single tensors and a root, a reduction or a timeout (`group.broadcast(x, 0)`), by
position or by name. Here both become tensors and options. The engine takes tensors of one dimension, contiguous, of
numbers that it can add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import ReduceOp

from ringside.engine.dtypes import DTYPES
from ringside.engine.transports.gloo_all_reduce import REDUCE_OPS
from ringside.errors import ArgumentError, UnsupportedError

_ORDER = [
    "output",
    "outputs",
    "output_tensors",
    "outputTensor",
    "output_tensor",
    "output_lists",
    "tensors",
    "tensor",
    "input",
    "inputs",
    "input_tensors",
    "inputTensor",
    "input_tensor",
    "input_list",
    "output_split_sizes",
    "input_split_sizes",
]
"""Names of tensors and splits, in the order in which torch's methods take them."""

_OF_LISTS = (c10d.AllgatherOptions, c10d.GatherOptions)
_TO_LISTS = (c10d.ScatterOptions, c10d.ReduceScatterOptions)


def normalize(options: Any, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """Return a call's tensors, as lists where torch's first signature has lists, and its options.

    Args:
        options: The class of options of that collective.
        args: As the method was called.
        named: By name.

    Raises:
        TypeError: An argument that no signature has.
    """
    if not named and args and type(args[-1]).__name__.endswith("Options"):
        return args
    given: dict[str, Any] = {key: named.pop(key) for key in ("opts", "op", "root", "timeout") if key in named}
    strange = named.keys() - set(_ORDER)
    if strange:
        raise TypeError(f"a process group's method got an argument {sorted(strange)[0]!r} that it does not know")
    tensors = []
    for arg in args:
        if isinstance(arg, (torch.Tensor, list, tuple)):
            tensors.append(arg)
        elif type(arg).__name__.endswith("Options"):
            given["opts"] = arg
        elif isinstance(arg, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
            given["op"] = arg
        elif isinstance(arg, timedelta):
            given["timeout"] = arg
        elif arg is not None:
            given["root"] = arg
    tensors += [named[key] for key in _ORDER if key in named]

    # Tensors as torch's first signature has them: lists, or lists of lists on the side that has one per rank.
    single = [isinstance(each, torch.Tensor) for each in tensors]
    if len(tensors) == 1 and single[0]:
        tensors = [[tensors[0]]]
    elif len(tensors) == 2 and single[0] != single[1] and issubclass(options, _OF_LISTS if single[1] else _TO_LISTS):
        tensors = [[each] for each in tensors]

    # What was given beside the options goes into them.
    opts = given.pop("opts", None) or options()
    if "op" in given:
        opts.reduceOp = given["op"]
    if "root" in given:
        opts.rootRank = int(given["root"])
    if given.get("timeout") is not None:
        opts.timeout = given["timeout"]
    return (*tensors, opts)


def first_tensor(tensors: Any) -> torch.Tensor | None:
    """Return the first tensor of a list of them however nested; None: there is none."""
    while isinstance(tensors, (list, tuple)) and tensors:
        tensors = tensors[0]
    return tensors if isinstance(tensors, torch.Tensor) else None


def limit_of(opts: Any, own_s: float | None) -> float | None:
    """Return the timeout of a call, seconds, which may be 0; where it has none, `own_s`."""
    timeout: timedelta = opts.timeout
    return timeout.total_seconds() if timeout.days >= 0 else own_s


# -------------------------------------------------------------------------------------------------
# Tensors as the engine takes them.

_OPS = {ReduceOp.AVG: "avg", **{op: name for name, op in REDUCE_OPS.items()}}
ENGINES_OWN = frozenset(getattr(torch, name) for name in DTYPES)


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
    return flat.view(torch.uint8) if moved and flat.dtype not in ENGINES_OWN else flat


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
    for part, own in zip(parts, torch.split_with_sizes(room, [part.flat.numel() for part in parts]), strict=True):
        part.flat.copy_(own)
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
    if name in ("band", "bor", "bxor") and dtype.is_floating_point:
        raise UnsupportedError(f"Cannot use ReduceOp.{name.upper()} with non-integral dtype {dtype}")
    if name not in ("sum", "avg") and dtype.is_complex:
        raise UnsupportedError(f"{name} of complex numbers is not defined here: sum and avg are")
    return name, 1.0


# -------------------------------------------------------------------------------------------------
# What collectives check of their tensors before anything is sent.


def lane_of(flat: torch.Tensor, comm: Any) -> torch.Tensor:
    """Return this rank's part of equal parts."""
    part = flat.numel() // comm.size
    return flat[part * comm.rank : part * (comm.rank + 1)]


def parts_of(flat: torch.Tensor, tensor: torch.Tensor, splits: Sequence[int], ranks: int) -> list[torch.Tensor]:
    """Return the parts of a flat tensor: of as many rows as `splits` says, or equal ones."""
    rows = tensor.shape[0] if tensor.dim() else 0
    splits = list(splits) or ([rows // ranks] * ranks if rows % ranks == 0 else [])
    if not splits:
        raise ArgumentError(f"all_to_all: Tensor's dim 0 does not divide equally across group size: {rows} by {ranks}")
    if len(splits) != ranks or sum(splits) != rows:
        raise ArgumentError(
            f"all_to_all: Split sizes doesn't match total dim 0 size: {splits} for {rows} rows and {ranks} ranks"
        )
    row = flat.numel() // max(rows, 1)
    return list(torch.split_with_sizes(flat, [rows_of_one * row for rows_of_one in splits]))


def check_parts(name: str, whole: torch.Tensor, part: torch.Tensor, ranks: int) -> None:
    """Refuse a whole that is not as large as all parts together."""
    if whole.numel() != part.numel() * ranks or whole.dtype != part.dtype:
        raise ArgumentError(
            f"{name}: {_misfit(whole, part)}: the whole must be {ranks} times a rank's part, of the same dtype, not "
            f"{whole.dtype} of {whole.numel()} elements for {part.dtype} of {part.numel()}"
        )


def check_root(name: str, root: int, ranks: int) -> None:
    """Refuse a root that there is not."""
    if not 0 <= root < ranks:
        raise ArgumentError(f"{name}: invalid root rank: {root}, where ranks are 0 to {ranks - 1}")


def check_single(name: str, tensors: Sequence[Any], what: str = "tensor list") -> None:
    """Refuse several tensors, which Gloo takes for contributions of one rank to one result, or refuses as well."""
    if len(tensors) != 1:
        raise ArgumentError(f"{name}: requires a single-element {what}, not {len(tensors)}")


def check_lists_of_root(name: str, lists: Sequence[Sequence[Any]], is_root: bool, ranks: int, side: str) -> None:
    """Refuse what is not one list of a tensor for every rank on the root, and nothing on other ranks."""
    if not is_root:
        if any(len(row) for row in lists):
            raise ArgumentError(f"{name}: requires empty {side} on non-root")
        return
    check_single(name, lists, f"{side} list containing a list with {ranks} tensors")
    check_list(f"{name}: Incorrect {side} list size {len(lists[0])}", lists[0], ranks)


def check_list(refusal: str, row: Sequence[Any], ranks: int) -> None:
    """Refuse a list that has not a tensor for every rank; `refusal` is what torch says of that."""
    if len(row) != ranks:
        raise ArgumentError(f"{refusal}: a list of tensors needs one for each of the {ranks} ranks, not {len(row)}")


def check_lengths(name: str, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
    """Refuse several collectives in one of which not each has an output and an input."""
    if len(outputs) != len(inputs):
        raise ArgumentError(
            f"{name}: requires input/output tensor lists to have the same length, not {len(inputs)} and {len(outputs)}"
        )


def check_own(name: str, entry: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    """Refuse an entry of a list that does not fit this rank's own tensor."""
    if (entry.numel(), entry.dtype) != (own.numel(), own.dtype):
        raise ArgumentError(
            f"{name} on rank {rank}: {_misfit(entry, own)}: the list has {entry.dtype} of {entry.numel()} elements "
            f"where the tensor is {own.dtype} of {own.numel()}"
        )


def _misfit(a: torch.Tensor, b: torch.Tensor) -> str:
    return "invalid tensor size" if a.dtype == b.dtype else "invalid tensor type"

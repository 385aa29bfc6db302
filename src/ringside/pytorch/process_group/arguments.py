"""The arguments of a process group's methods: torch gives most of them two signatures, with and without options.

Either lists of tensors and options (`group.allreduce([x], opts)`), or single tensors and a root, a reduction or a
timeout (`group.broadcast(x, 0)`), by position or by name. Here both become tensors and options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ringside.errors import UsageError

_ORDER = (
    *("output", "outputs", "output_tensors", "outputTensor", "output_tensor", "output_lists", "tensors", "tensor"),
    *("input", "inputs", "input_tensors", "inputTensor", "input_tensor", "input_list"),
    *("output_split_sizes", "input_split_sizes"),
)
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


def limit_of(opts: Any) -> float | None:
    """Return the timeout of a call, seconds; None: the group's own."""
    timeout: timedelta = opts.timeout
    return timeout.total_seconds() if timeout.days >= 0 and timeout else None


# -------------------------------------------------------------------------------------------------
# What collectives check of their tensors before anything is sent.

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

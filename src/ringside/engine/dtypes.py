"""Element types and reductions by name, with the codes the native core uses for them.

NumPy and torch spell dtypes differently; both end in the same name here. torch is never imported: a torch dtype is
recognised by what it prints.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ringside._core.enums import DType, ReduceOp
from ringside._core.numpy_kernels import STORED_AS
from ringside.errors import UnsupportedError, UsageError

# Names and sizes by code.
DTYPES: tuple[str, ...] = tuple(DType.__members__)
OPS: tuple[str, ...] = tuple(ReduceOp.__members__)
ITEM_BYTES: tuple[int, ...] = tuple(np.dtype(STORED_AS.get(name, name)).itemsize for name in DTYPES)

OP_CODES: dict[str, int] = {name: int(op) for name, op in ReduceOp.__members__.items()}
FLOATING = frozenset(("float32", "float64", "float16", "bfloat16"))


class _DtypeCodes(dict[Any, int]):
    """Codes of the dtype objects that were asked for: to ask one for its name takes microseconds."""

    def __missing__(self, dtype: Any) -> int:
        name = str(dtype)
        name = name[len("torch.") :] if name.startswith("torch.") else np.dtype(dtype).name
        if name not in DTYPES or not getattr(dtype, "isnative", True):  # isnative: NumPy's of this byte order
            raise UnsupportedError(f"dtype {name} cannot be reduced; convert to one of {', '.join(DTYPES)}")
        code = self[dtype] = DTYPES.index(name)
        return code


dtype_code: Callable[[Any], int] = _DtypeCodes().__getitem__
"""Return the core's code of a NumPy or torch dtype; `UnsupportedError` names one that has none."""


class NamedOp(Protocol):
    """What `torch.distributed.ReduceOp.SUM` and the others are: the engine knows them by their names, without torch."""

    @property
    def name(self) -> str:
        """Such as SUM or PRODUCT."""


Op = str | NamedOp
"""A reduction, as users give it: a name of `OPS`, or torch's."""


def op_name(op: Op) -> str:
    """Return the name of a reduction, one of `OPS`.

    Raises:
        UsageError: There is none of that name; lists what exists. torch's PREMUL_SUM carries a factor: that is `scale`.
    """
    if isinstance(op, str):
        name = op
    else:
        name = str(getattr(op, "name", "")).lower().replace("product", "prod")
    if name == "premul_sum" or (not name and type(op).__name__ == "ReduceOp"):  # torch's with a factor has no name
        raise UsageError("a ReduceOp that carries a factor (PREMUL_SUM) is not supported: give op='sum' and scale=")
    if name not in OP_CODES:
        raise UsageError(f"unknown reduction {op!r}; there are {', '.join(OPS)}")
    return name


def is_allowed(dtype: int, op: int) -> bool:
    """Return whether a reduction is defined for a dtype: bitwise ones on integers and bool, no average of bool."""
    if op > ReduceOp.max:
        return DTYPES[dtype] not in FLOATING
    return not (op == ReduceOp.avg and dtype == DType.bool)


# -------------------------------------------------------------------------------------------------
# The weights of a mean over ranks.


def own_weight(weights: float | Sequence[float], rank: int, size: int) -> tuple[float, int]:
    """Return this rank's weight and a hash of what all ranks must have given alike.

    Args:
        weights: This rank's own weight, or one weight per rank.
        rank: This rank.
        size: Number of ranks.

    Raises:
        UsageError: A weight is negative or not finite, there are not as many as ranks, or they sum to 0.
    """
    try:
        values = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"weights must be a number, or one number per rank, not {weights!r}") from None
    if values.ndim > 1 or (values.ndim == 1 and len(values) != size):
        raise UsageError(f"weights must be a number, or {size} of them, one per rank, not {weights!r}")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise UsageError(f"weights must be finite and not negative, not {weights!r}")
    if values.ndim == 0:  # a rank's own: that they do not sum to 0 only all ranks together can check
        return float(values), 0
    if not math.fsum(values) > 0:
        raise UsageError("the weights of all ranks sum to 0, so there is no mean")
    return float(values[rank]), zlib.crc32(values.tobytes()) or 1

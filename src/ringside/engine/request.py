"""A collective as the core executes it: its codes, and what is checked before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside._core.enums import Algorithm, Kind, ReduceOp
from ringside.engine.buffers import Flat
from ringside.engine.dtypes import DTYPES, FLOATING, OP_CODES, Op, is_allowed, op_name
from ringside.errors import UnsupportedError, UsageError

KINDS: tuple[str, ...] = tuple(Kind.__members__)
"""Names of the collectives, by code."""
_CODES: dict[str, int] = {name: int(kind) for name, kind in Kind.__members__.items()}


class CoreRequest(NamedTuple):
    """One collective of one rank; what `_core`'s `collective` needs besides where the tensor is shared.

    Args:
        kind: A name of `KINDS`.
        flat: The tensor it works on, or takes its input from.
        out: Address of the result, 0: in place.
        numel: Elements that `bounds` divide; may be more than `flat` has, where that is one lane.
        op: Code of the reduction.
        algorithm: Code of the algorithm: automatic, one_shot, direct, or a program (see `program`).
        scale: Multiplies this rank's contribution.
        own_scale: Ranks may have different scales; avg then divides by their sum.
        root: The rank that gives or gets alone, or -1.
        tag: Hash of anything else that must be equal on all ranks.
        bounds: Element offsets of the ranks' lanes, ranks + 1 of them; empty: no lanes.
        program: The compiled schedule to run, or -1.
        keeps: The owner of the memory at `out`: kept alive as long as the call.
    """

    kind: str
    flat: Flat
    numel: int
    bounds: Sequence[int] = ()
    out: int = 0
    op: int = int(ReduceOp.sum)
    algorithm: int = int(Algorithm.automatic)
    scale: float = 1.0
    own_scale: bool = False
    root: int = -1
    tag: int = 0
    program: int = -1
    keeps: Any = None

    def arguments(self) -> tuple[Any, ...]:
        """Return the leading arguments of `collective`, up to the shape."""
        return (
            _CODES[self.kind],
            self.flat.address,
            self.out,
            self.numel,
            self.flat.dtype,
            self.op,
            self.algorithm,
            self.scale,
            self.own_scale,
            self.root,
            self.tag,
            self.bounds,
            self.flat.shape,
        )


def checked_op(flat: Flat, op: Op, *, scaled: bool = False) -> int:
    """Return the code of a reduction; refuse one that is not defined for the tensor's dtype, or cannot be scaled."""
    op = op_name(op)
    code = OP_CODES[op]
    name = DTYPES[flat.dtype]
    if not is_allowed(flat.dtype, code):
        raise UnsupportedError(f"{op} of {name} is not defined: bitwise reductions need integers, avg needs numbers")
    if scaled and (op not in ("sum", "avg") or name not in FLOATING):
        raise UnsupportedError(f"scale and weights work with sum and avg of floating dtypes, not with {op} of {name}")
    return code


def checked_bounds(bounds: Sequence[int], ranks: int, numel: int) -> list[int]:
    """Return lanes' bounds as a list of ints; `UsageError` where they do not ascend from 0 to at most `numel`."""
    values = [int(bound) for bound in bounds]
    ascending = values == sorted(values)
    if len(values) != ranks + 1 or not ascending or values[0] < 0 or values[-1] > numel:
        raise UsageError(
            f"bounds must be {ranks + 1} ascending element offsets between 0 and {numel}, a lane per rank, not {values}"
        )
    return values


def equal_bounds(lane: int, ranks: int) -> list[int]:
    """Return the bounds of `ranks` lanes of `lane` elements each."""
    return list(range(0, lane * ranks + 1, lane)) if lane else [0] * (ranks + 1)


def bounds_of_one(rank: int, ranks: int, numel: int) -> list[int]:
    """Return bounds that give everything to one rank."""
    return [0] * (rank + 1) + [numel] * (ranks - rank)


# -------------------------------------------------------------------------------------------------
# `split`: what each rank requests, and which ranks are in which group.


def encode_split(color: int | None, key: int | None, rank: int) -> tuple[int, int, int]:
    """Return what a rank sends to the others: whether it is in a group, in which, and where in its order.

    Raises:
        UsageError: `color` or `key` is neither None nor an integer of 64 bits.
    """
    return (
        int(color is not None),
        _integer("color", 0 if color is None else color),
        _integer("key", rank if key is None else key),
    )


def split_members(requests: NDArray[np.int64], rank: int) -> list[int]:
    """Return the ranks in the group of `rank`, in the group's order.

    Args:
        requests: Every rank's `encode_split`, int64 [ranks, 3].
        rank: One that is in a group.
    """
    inside, colors, keys = requests.T
    members = np.flatnonzero((inside != 0) & (colors == colors[rank]))
    order: list[int] = members[np.argsort(keys[members], kind="stable")].tolist()
    return order


def _integer(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise UsageError(f"split's {name} must be an integer of 64 bits or None, not {value!r}")
    return number

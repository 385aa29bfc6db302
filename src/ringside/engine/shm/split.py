"""Sub-groups: what each rank requests, and which ranks are in which."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError


def encode_request(color: int | None, key: int | None, rank: int) -> tuple[int, int, int]:
    """Return what a rank sends to the others: whether it is in a group, in which, and where in its order.

    Raises:
        UsageError: `color` or `key` is neither None nor an integer of 64 bits.
    """
    return (
        int(color is not None),
        _integer("color", 0 if color is None else color),
        _integer("key", rank if key is None else key),
    )


def members_of(requests: NDArray[np.int64], rank: int) -> list[int]:
    """Return the ranks in the group of `rank`, in the group's order.

    Args:
        requests: Every rank's `encode_request`, int64 [ranks, 3].
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

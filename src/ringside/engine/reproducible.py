"""Reproducible mode: which algorithms add up every element as ((x0 + x1) + x2) + ..., whatever the layout.

Floating-point addition does not associate, so a result depends on the order of additions: that of a ring depends on
which chunk an element falls into, hence on the tensor's size and the bucket layout; that of a hierarchical algorithm on
who shares a host. An algorithm whose every chunk is the left fold in rank order (`Audit.canonical`, the expression that
`verify` prints) has none of this. All paths inside a host fold that way.
"""

from __future__ import annotations

import functools

from ringside.engine.choice import NATIVE, Choice
from ringside.engine.dtypes import DTYPES
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, by_name, verify

SMALL_BYTES = 16 << 10
_PROVED_RANKS = 16  # that a schedule is canonical is proved for up to so many ranks, the largest that is quick
_HALVES = ("float16", "bfloat16")


def canonical_choice(size_bytes: int, ranks: int) -> Choice:
    """Return how to reduce a tensor of that size reproducibly: one round for small ones, the fewest bytes else."""
    return Choice("one_shot" if size_bytes * (ranks - 1) <= SMALL_BYTES * 8 else "direct")


def refuse_other_orders(choice: Choice, ranks: int, dtype: int) -> None:
    """Raise `UsageError` unless a choice gives the same bits as every other canonical one.

    Args:
        choice: How an all-reduce shall be carried out.
        ranks: Number of ranks.
        dtype: Code of the element type; those of 16 bits must be added up in one go, or partial sums are rounded.
    """
    fine = choice.over == "ranks" and choice.algorithm in canonical_algorithms(min(ranks, _PROVED_RANKS))
    if fine and DTYPES[dtype] in _HALVES and choice.algorithm == "chain":
        fine = False
    if fine and choice.order:
        fine = choice.order == tuple(range(ranks))
    if not fine:
        names = ", ".join(canonical_algorithms(min(ranks, _PROVED_RANKS)))
        raise UsageError(
            f"reproducible mode adds in rank order, and {choice} does not: leave algorithm out, or take one of {names}"
        )


@functools.lru_cache(maxsize=64)
def canonical_algorithms(ranks: int) -> tuple[str, ...]:
    """Return the algorithms that `verify` proves to add in rank order for that many ranks."""
    names = []
    for name in ALGORITHMS:
        schedule = by_name(name, ranks)
        if name != NATIVE and not schedule.switches and verify(schedule).canonical:
            names.append(name)
    return tuple(names)

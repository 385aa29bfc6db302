"""What a schedule is for: who holds what at the start, and where which result must be at the end.

A collective is two tables of booleans, [ranks, chunks]: `holds` (the pre-condition) and `wants` (the post-condition).
**The result of a chunk is the sum of everything that was held of it at the start**, each contribution exactly once. So
a broadcast is a sum of one contribution, wanted everywhere, and one verifier proves all collectives.

Where chunks belong to ranks (reduce-scatter, all-gather, gather, scatter), chunk c belongs to rank `c*n//chunks`. An
all-to-all is cut into n*n blocks of chunks; block i*n+j starts on rank i and ends on rank j.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError

Table = NDArray[np.bool_]

# name -> (who holds a chunk at the start, who wants it at the end, least bytes of the busiest rank in units of S)
_CONDITIONS: dict[str, tuple[str, str, Callable[[int], Fraction]]] = {
    "all_reduce": ("all", "all", lambda n: Fraction(2 * (n - 1), n)),
    "reduce_scatter": ("all", "owner", lambda n: Fraction(n - 1, n)),
    "all_gather": ("owner", "all", lambda n: Fraction(n - 1, n)),
    "broadcast": ("root", "all", lambda n: Fraction(int(n > 1))),
    "reduce": ("all", "root", lambda n: Fraction(int(n > 1))),
    "gather": ("owner", "root", lambda n: Fraction(n - 1, n)),
    "scatter": ("root", "owner", lambda n: Fraction(n - 1, n)),
    "all_to_all": ("source", "target", lambda n: Fraction(n - 1, n * n)),
    "barrier": ("all", "all", lambda n: Fraction(0)),
}


@dataclass(frozen=True, slots=True)
class Collective:
    """What a schedule must achieve.

    Args:
        name: `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `reduce`, `gather`, `scatter`, `all_to_all` or
            `barrier`.
        root: The rank that gives or gets everything; for broadcast, reduce, gather and scatter only. Within a group it
            is a position in the group.
        group: The ranks that take part, in the group's order; None: all of them.

    Raises:
        UsageError: There is no such collective, or it has no root, or needs one.
    """

    name: str
    root: int | None = None
    group: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.name not in _CONDITIONS:
            raise UsageError(f"there is no collective {self.name!r}; there are {', '.join(_CONDITIONS)}")
        if self.rooted != (self.root is not None):
            raise UsageError(f"{self.name} {'needs a root' if self.rooted else 'has no root'}")

    @property
    def rooted(self) -> bool:
        """Whether one rank gives or gets everything."""
        return "root" in _CONDITIONS[self.name][:2]

    @property
    def owned(self) -> bool:
        """Whether a chunk's number says which rank it belongs to."""
        return bool({"owner", "source"} & set(_CONDITIONS[self.name][:2]))

    @property
    def reduces(self) -> bool:
        """Whether ranks' contributions are added up."""
        return _CONDITIONS[self.name][0] == "all"

    @property
    def exactly_once(self) -> bool:
        """Whether a contribution may be in the result only once; a barrier, which moves no data, does not mind."""
        return self.name != "barrier"

    def holds(self, ranks: int, chunks: int, of: NDArray[np.int64] | None = None) -> Table:
        """Return who holds a contribution at the start, bool [ranks, len(of)]; `of`: chunk numbers, default all."""
        return self._table(_CONDITIONS[self.name][0], ranks, chunks, of)

    def wants(self, ranks: int, chunks: int, of: NDArray[np.int64] | None = None) -> Table:
        """Return who must hold the result at the end, bool [ranks, len(of)]; `of`: chunk numbers, default all."""
        return self._table(_CONDITIONS[self.name][1], ranks, chunks, of)

    def members(self, ranks: int) -> NDArray[np.int64]:
        """Return the ranks that take part, int64, in the group's order."""
        return np.arange(ranks, dtype=np.int64) if self.group is None else np.array(self.group, dtype=np.int64)

    def lower_bound_bytes(self, ranks: int) -> Fraction:
        """Return what the busiest rank must send or receive at least, in units of the tensor, without a switch."""
        return _CONDITIONS[self.name][2](len(self.members(ranks)))

    def _table(self, who: str, ranks: int, chunks: int, of: NDArray[np.int64] | None) -> Table:
        members = self.members(ranks)
        n = len(members)
        chunk = np.arange(chunks, dtype=np.int64) if of is None else of
        table = np.zeros((ranks, len(chunk)), dtype=np.bool_)
        if who == "all":
            table[members] = True
        else:
            block = chunk * n * n // chunks
            position = {"owner": chunk * n // chunks, "source": block // n, "target": block % n}.get(who, self.root)
            table[members[position], np.arange(len(chunk))] = True
        return table

    def __str__(self) -> str:
        """Say it in words, such as `broadcast from rank 2`."""
        words = self.name
        if self.root is not None:
            root = self.root if self.group is None else self.group[self.root]
            words += f" {'from' if _CONDITIONS[self.name][0] == 'root' else 'to'} rank {root}"
        return words if self.group is None else f"{words} among ranks {', '.join(map(str, self.group))}"


ALL_REDUCE = Collective("all_reduce")
REDUCE_SCATTER = Collective("reduce_scatter")
ALL_GATHER = Collective("all_gather")
ALL_TO_ALL = Collective("all_to_all")
BARRIER = Collective("barrier")


def rooted(name: str, ranks: int, root: int) -> Collective:
    """Return a collective with a root; raise `UsageError` unless 0 ≤ root < ranks."""
    if not 0 <= root < max(ranks, 1):
        raise UsageError(f"{name} among {ranks} ranks cannot have root {root}: ranks are 0 to {ranks - 1}")
    return Collective(name, root)

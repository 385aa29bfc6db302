"""The two-tree."""

from __future__ import annotations

from dataclasses import replace

from ringside.schedule.combine import relabel, striped
from ringside.schedule.schedule import Schedule
from ringside.schedule.tree import tree


def two_tree(n: int) -> Schedule:
    """The two-tree: half of the tensor over each of two trees whose inner ranks are leaves in the other.

    P. Sanders, J. Speck, J. L. Träff: "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
    Computing 35 (2009).

    Return the two-tree all-reduce of `n` ranks: two striped trees.

    The second tree is the first one mirrored (rank r plays n-1-r) for even n, and shifted by one (rank r+1 mod n plays
    r) for odd n. Ranks that are inner in one tree are leaves in the other, with one exception: for odd n > 1 rank 0 is
    inner in both, as the root of the first and as the last inner rank, with one child, of the second. Even so a rank
    sends and receives at most 2 tensors, against 3 in the single tree.
    2 chunks, 2 ceil(log2(n)) rounds. Pipeline it for large tensors.

    Raises:
        UsageError: n < 1.
    """
    if n <= 1:
        return replace(tree(1), name="two_tree", ranks=n)
    return striped([tree(n), relabel(tree(n), second_order(n))], name="two_tree")


def second_order(n: int) -> list[int]:
    """Return which rank plays each rank of the first tree in the second."""
    return [n - 1 - r for r in range(n)] if n % 2 == 0 else [(r + 1) % n for r in range(n)]

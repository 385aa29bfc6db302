"""The tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ringside.schedule.collective import rooted
from ringside.schedule.combine import relabel, reverse, striped
from ringside.schedule.schedule import Round, Schedule


def tree(n: int) -> Schedule:
    """The tree: sums climb a binary tree, the result comes down again. Logarithmic depth, any number of ranks.

    The in-order tree: P. Sanders, J. Speck, J. L. Träff: "Two-tree algorithms for full bandwidth broadcast, reduction
    and scan", Parallel Computing 35 (2009); with rank 0 on top, as NCCL builds it (S. Jeaugey: "Massively scale your
    deep learning training with NCCL 2.4", 2019).

    Return the binary-tree all-reduce of `n` ranks: reduce to rank 0, then broadcast from it.

    One chunk, 2 ceil(log2(n)) rounds, at most two children per rank, so at most 3 tensors sent and received. Odd ranks
    are leaves. A rank adds its left subtree, itself, its right subtree: the sum is in rank order, but bracketed as the
    tree is. Pipeline it for large tensors.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("tree", n, 1, 2 * max(n - 1, 0).bit_length(), _tree_round, (n,))


def parents(n: int) -> NDArray[np.int64]:
    """Return every rank's parent in the in-order tree, int64 [n]; -1 for rank 0, the root.

    Below the root, which has one child, rank r's height is the number of zeros at the end of r, and ranks of its left
    subtree are lower, of its right subtree higher.
    """
    rank = np.arange(n, dtype=np.int64)
    low = rank & -rank
    up = (rank ^ low) | (low << 1)
    parent: NDArray[np.int64] = np.where(up < n, up, rank ^ low)
    parent[:1] = -1
    return parent


def _tree_round(n: int, k: int) -> Round:
    parent = parents(n)
    # How far every rank is from the root.
    depth, ancestor = np.zeros_like(parent), parent.copy()
    while (inside := ancestor >= 0).any():
        depth[inside] += 1
        ancestor[inside] = parent[ancestor[inside]]
    deepest = int(depth.max())
    climbing = k < deepest
    child = np.flatnonzero(depth == (deepest - k if climbing else k - deepest + 1)).astype(np.int32)
    above = parent[child].astype(np.int32)
    src, dst = (child, above) if climbing else (above, child)
    return Round(src, dst, np.zeros_like(child), np.full(len(child), climbing))


# -------------------------------------------------------------------------------------------------
# The two-tree.


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
    second = [n - 1 - r for r in range(n)] if n % 2 == 0 else [(r + 1) % n for r in range(n)]
    return striped([tree(n), relabel(tree(n), second)], name="two_tree")


# -------------------------------------------------------------------------------------------------
# The binomial tree: in every round, everybody who has the tensor hands it to one who has not.
#
# R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19 (2005), on broadcast.


def binomial_broadcast(n: int, root: int = 0) -> Schedule:
    """Return the broadcast of rank `root`'s tensor among `n` ranks.

    One chunk, ceil(log2(n)) rounds (the fewest there can be), at most as many tensors sent, one received, one port.

    Raises:
        UsageError: n < 1, or there is no such root.
    """
    rounds = max(n - 1, 0).bit_length()
    collective = rooted("broadcast", n, root)
    return Schedule("binomial_broadcast", n, 1, rounds, _broadcast_round, (n, root), collective=collective)


def binomial_reduce(n: int, root: int = 0) -> Schedule:
    """Return the reduce of `n` ranks' tensors to rank `root`: the broadcast backwards; raise `UsageError` alike."""
    rooted("reduce", n, root)  # a wrong root is said of the reduce
    return replace(reverse(binomial_broadcast(n, root)), name="binomial_reduce")


def _broadcast_round(n: int, root: int, k: int) -> Round:
    having = np.arange(min(1 << k, n - (1 << k)), dtype=np.int32)
    src, dst = (root + having) % n, (root + having + (1 << k)) % n
    return Round(src, dst, np.zeros_like(src), np.zeros(len(src), dtype=np.bool_))

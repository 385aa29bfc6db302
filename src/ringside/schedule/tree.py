"""The tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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


def depths(parent: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how far every rank is from the root, int64 [n], given `parents`."""
    depth = np.zeros_like(parent)
    above = parent.copy()
    while (inside := above >= 0).any():
        depth[inside] += 1
        above[inside] = parent[above[inside]]
    return depth


def _tree_round(n: int, k: int) -> Round:
    parent = parents(n)
    depth = depths(parent)
    deepest = int(depth.max())
    climbing = k < deepest
    child = np.flatnonzero(depth == (deepest - k if climbing else k - deepest + 1)).astype(np.int32)
    above = parent[child].astype(np.int32)
    src, dst = (child, above) if climbing else (above, child)
    return Round(src, dst, np.zeros_like(child), np.full(len(child), climbing))

"""Analytics on several processes: k-means over points that are unevenly spread over the ranks.

    torchrun --nproc-per-node 2 --no-python python examples/numpy_kmeans.py

Every rank sees its own points only. A `reduce_scatter` sums some of the clusters on each rank, which averages them and
shares them with all by `all_gather`. It requires only NumPy.
"""

from __future__ import annotations

import numpy as np

import ringside

CENTRES = np.array([[0.0, 0.0], [8.0, 0.0], [0.0, 8.0], [8.0, 8.0], [4.0, 16.0], [16.0, 4.0]])


def own_points(rank: int) -> np.ndarray:
    """Return this rank's points, [points, 2]: the higher the rank, the more."""
    rng = np.random.default_rng(rank)
    kinds = rng.integers(0, len(CENTRES), 3000 * (rank + 1))
    return CENTRES[kinds] + rng.normal(scale=0.5, size=(len(kinds), 2))


def nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return the number of the nearest centre of each point."""
    return ((points[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)


def improved(comm: ringside.Communicator, points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return the mean of all ranks' points nearest to each centre."""
    # Whole rows per rank: more of them than there are clusters, where the ranks do not divide those evenly.
    rows = -(-len(centres) // comm.size) * comm.size
    sums = np.zeros((rows, 3))
    np.add.at(sums, nearest(points, centres), np.column_stack([points, np.ones(len(points))]))
    own = comm.reduce_scatter(sums)
    means = own[:, :2] / np.maximum(own[:, 2:], 1)
    return comm.all_gather(means)[: len(centres)]


def main() -> None:
    """Find the clusters from a guess that rank 0 makes, and tell how far points are from them on average."""
    with ringside.init() as comm:
        points = own_points(comm.rank)
        centres = CENTRES + np.random.default_rng(7).normal(size=CENTRES.shape) if comm.rank == 0 else CENTRES * np.nan
        comm.broadcast(centres)
        for _ in range(10):
            centres = improved(comm, points, centres)

        distance = np.linalg.norm(points - centres[nearest(points, centres)], axis=1)
        mean = comm.all_reduce(np.array([distance.mean()]), op="avg", weights=len(points))  # ranks differ in points
        counts = comm.gather(np.array([len(points)]))
        if counts is not None:
            print("points per rank", counts.ravel().tolist())
            print("centres", *(f"({round(x)}, {round(y)})" for x, y in centres))
            print(f"mean distance {mean[0]:.2f}")


if __name__ == "__main__":
    main()

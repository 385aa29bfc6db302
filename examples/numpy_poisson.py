"""A simulation step on several processes: the electric potential of some charges, by a parallel Fourier transform.

    torchrun --nproc-per-node 2 --no-python python examples/numpy_poisson.py

Every rank holds a slab of rows of a periodic grid. A two-dimensional transform is one along the rows, a transpose
between all ranks (`all_to_all`), and one along what were the columns. It requires only NumPy.
"""

from __future__ import annotations

import numpy as np

import ringside

POINTS = 240  # per side of the grid; must be a multiple of the number of ranks


def transposed(comm: ringside.Communicator, slab: np.ndarray) -> np.ndarray:
    """Return this rank's rows of the transposed grid; `slab` is [rows, POINTS], so is the result."""
    rows = len(slab)
    blocks = slab.reshape(rows, comm.size, rows).swapaxes(0, 1)  # block j, [rows, rows], goes to rank j
    return comm.all_to_all(np.ascontiguousarray(blocks)).transpose(2, 0, 1).reshape(rows, POINTS)


def potential_of(comm: ringside.Communicator, charge: np.ndarray) -> np.ndarray:
    """Return this rank's rows of u with -(u_xx + u_yy) = charge, on a square with sides of length 1."""
    waves = transposed(comm, np.fft.fft(charge, axis=1))
    waves = np.fft.fft(waves, axis=1)  # now row i of this rank is the wave number i along x
    rows = len(charge)
    k = (2 * np.sin(np.pi * np.fft.fftfreq(POINTS)) * POINTS) ** 2  # of the five-point stencil
    scale = k[comm.rank * rows : (comm.rank + 1) * rows, None] + k
    scale[scale == 0] = np.inf  # the mean of the potential is free: 0
    waves = transposed(comm, np.fft.ifft(waves / scale, axis=1))
    return np.fft.ifft(waves, axis=1).real


def residual(comm: ringside.Communicator, u: np.ndarray, charge: np.ndarray) -> float:
    """Return the largest error of the stencil anywhere on the grid; edge rows come from the neighbours."""
    edges = comm.all_gather(np.stack([u[0], u[-1]]))  # [2 * ranks, POINTS]: first and last row of every rank
    above, below = edges[2 * comm.rank - 1], edges[(2 * comm.rank + 2) % len(edges)]
    tall = np.vstack([above, u, below])
    bent = tall[:-2] + tall[2:] + np.roll(u, 1, axis=1) + np.roll(u, -1, axis=1) - 4 * u
    worst = np.array(np.abs(bent * POINTS**2 + charge).max())
    return float(comm.all_reduce(worst, op="max"))


def main() -> None:
    """Scatter the charges, solve, check the solution, and gather it."""
    with ringside.init() as comm:
        rows = POINTS // comm.size
        charge, grid = np.empty((rows, POINTS)), None
        if comm.rank == 0:
            grid = np.zeros((comm.size, rows, POINTS))
            flat = grid.reshape(POINTS, POINTS)
            flat[60, 60], flat[180, 100] = 1.0, -1.0
        comm.scatter(charge, grid)

        u = potential_of(comm, charge)
        error = residual(comm, u, charge)
        mean = comm.all_reduce(np.array(u.mean()), op="avg")
        whole = comm.gather(u)
        if whole is not None:
            whole = whole.reshape(POINTS, POINTS)
            print(f"{comm.size} ranks, a grid of {POINTS} x {POINTS}")
            print("solved" if error < 1e-9 else f"wrong by {error}", "with mean", abs(round(float(mean), 12)))
            print("highest at", *divmod(int(whole.argmax()), POINTS), "lowest at", *divmod(int(whole.argmin()), POINTS))


if __name__ == "__main__":
    main()

"""What a prediction must be better than: one Hockney line, interpolation, and NCCL's own constants used as a timer."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.predict.topology.topology import Topology

Floats = NDArray[np.float64]


def hockney(sizes: ArrayLike, times_s: ArrayLike, requested: ArrayLike) -> Floats:
    """Return times by t = α + S/B, fitted to rows by iterated least squares on relative errors.

    R. W. Hockney, "The communication challenge for MPP", 1994. α and 1/B are kept positive.

    Args:
        sizes: Bytes of the fitted rows, [n], n ≥ 1.
        times_s: Their seconds, [n].
        requested: Bytes to predict, [m].

    Returns:
        Seconds, float64 [m].
    """
    x, t = np.asarray(sizes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    weights = np.ones(len(x))
    alpha, beta = float(t.min()), 0.0
    for _ in range(30):
        scaled = np.stack([np.ones(len(x)), x], axis=1) * (weights / t)[:, None]
        found = np.linalg.lstsq(scaled, weights, rcond=None)[0]
        alpha, beta = max(float(found[0]), 1e-9), max(float(found[1]), 0.0)
        if found[1] < 0:  # only latency is left
            alpha = float(np.exp(np.mean(np.log(t))))
        weights = 1 / np.sqrt(np.maximum(np.abs((alpha + beta * x) / t - 1), 1e-3))
    result: Floats = alpha + beta * np.asarray(requested, dtype=np.float64)
    return result


def interpolate(sizes: ArrayLike, times_s: ArrayLike, requested: ArrayLike) -> Floats:
    """Return times on the line between neighbours in log-log; beyond the last two rows that line goes on.

    Arguments and result as of `hockney`; rows of one size count as their geometric mean.
    """
    x, logs = np.log(np.asarray(sizes, dtype=np.float64)), np.log(np.asarray(times_s, dtype=np.float64))
    places, index = np.unique(x, return_inverse=True)
    means = np.bincount(index, logs) / np.bincount(index)
    where = np.log(np.asarray(requested, dtype=np.float64))
    result = np.interp(where, places, means)
    if len(places) > 1:
        for beyond, a, b in ((where < places[0], 0, 1), (where > places[-1], -1, -2)):
            slope = (means[a] - means[b]) / (places[a] - places[b])
            result[beyond] = means[a] + slope * (where[beyond] - places[a])
    return np.asarray(np.exp(result), dtype=np.float64)


# ------------------------------------------------------------------------------------------------ NCCL's constants

# https://github.com/NVIDIA/nccl/blob/5067397/src/graph/tuning.cc (NCCL 2.30.7): microseconds, GB/s.
_BASE = {"Tree": (6.8, 14.0, 8.4), "Ring": (6.6, 14.0, 8.4), "NVLS": (0.0, 0.0, 0.0), "NVLSTree": (0.0, 0.0, 0.0)}
_HOPS = {  # LL, LL128, Simple
    "NVLINK": {"Tree": (0.6, 1.25, 4.0), "Ring": (0.6, 1.9, 3.4), "NVLS": (0, 0, 25), "NVLSTree": (0, 0, 25)},
    "PCI": {"Tree": (1.0, 1.9, 4.0), "Ring": (1.0, 2.5, 5.7), "NVLS": (0, 0, 0), "NVLSTree": (0, 0, 0)},
    "NET": {"Tree": (5.0, 8.5, 14.0), "Ring": (2.7, 4.0, 14.0), "NVLS": (0, 0, 18), "NVLSTree": (0, 0, 20.9)},
}
_CHANNELS = 16
# Per architecture and 1, 2, 4 or more hosts
_LL_MOST = {"Ampere": (87.7, 22.5, 19.0), "Hopper": (141.0, 45.0, 35.0), "Blackwell": (282.0, 90.0, 70.0)}
_RING_LL128 = {"Ampere": (20, 20, 20), "Hopper": (36.7, 36.7, 36.7), "Blackwell": (40, 40, 40)}
_TREE_LL128 = {"Ampere": (20, 20, 20), "Hopper": (36.7, 36.7, 29), "Blackwell": (55.6, 31.67, 20)}
_TREE = {"Ampere": (24, 23.6, 17.8), "Hopper": (38.7, 41.4, 36), "Blackwell": (70, 42.8, 24)}
_NVLS_TREE = {"Ampere": (0, 0, 0), "Hopper": (0, 57.7, 45.5), "Blackwell": (0, 96, 80)}
_NVLS = {"Ampere": 0.0, "Hopper": 0.85, "Blackwell": 0.74}
# Tree's correction by log2(bytes / 64)
_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9,
     0.9),
)  # fmt: skip


def nccl_constants(topology: Topology, requested: ArrayLike) -> Floats:
    """Return the times that NCCL's tuner computes for its own choice: the least over algorithms and protocols.

    The tuner needs them only to compare; taken as seconds they are a baseline. Bandwidths per channel and efficiencies
    are NCCL's, link rates the topology's.

    Args:
        topology: Its rates; `nvls` tells Hopper and Blackwell from what came before.
        requested: Bytes, [m].

    Returns:
        Seconds, float64 [m].
    """
    sizes = np.asarray(requested, dtype=np.float64)
    best = np.full(len(sizes), np.inf)
    for algorithm in ("Ring", "Tree", "NVLS", "NVLSTree"):
        for protocol in range(3):
            full = _rate(topology, algorithm, protocol)
            if full <= 0:
                continue
            rate = np.full(len(sizes), full)
            if algorithm == "Tree":
                place = np.clip(np.floor(np.log2(np.maximum(sizes / 64, 1))), 0, 23).astype(int)
                rate *= np.array(_CORRECTION[protocol], dtype=np.float64)[place]
            best = np.minimum(best, (_latency(topology, algorithm, protocol) + sizes / (1e3 * rate)) * 1e-6)
    return best


def _rate(topology: Topology, algorithm: str, protocol: int) -> float:
    """Return the algorithm bandwidth, GB/s; 0 where the topology does not allow the algorithm."""
    name = "Ampere"
    if topology.nvls is not None:
        name = "Blackwell" if topology.nvls.bytes_per_s > 400e9 else "Hopper"
    place = min(topology.hosts, 3) - 1  # 1, 2, more hosts
    inside = topology.inside.bytes_per_s / 1e9 if topology.inside is not None else math.inf
    between = (
        topology.nics * topology.between.bytes_per_s / 1e9 if topology.between and topology.hosts > 1 else math.inf
    )
    bus = min(inside, between) if algorithm == "Ring" or topology.hosts > 2 else min(inside, 2 * between)
    ranks = topology.ranks
    if algorithm == "Ring":
        most = (_LL_MOST[name][place], _CHANNELS * _RING_LL128[name][place], math.inf)[protocol]
        return min(bus * (0.5, 0.92, 1.0)[protocol], most) * ranks / (2 * (ranks - 1))
    if algorithm == "Tree":
        most = (_LL_MOST[name][place], _CHANNELS * _TREE_LL128[name][place], _CHANNELS * _TREE[name][place])[protocol]
        share = (1 / 3.8, 7 / 9 if topology.hosts == 1 else 0.92, 0.92)[protocol]
        return 0.5 * min(bus * share, most)
    if protocol != 2 or topology.nvls is None:
        return 0.0
    if algorithm == "NVLS":
        return _NVLS[name] * inside * ranks / (ranks + 1) if topology.hosts == 1 else 0.0
    return 0.5 * min(_NVLS[name] * bus, _CHANNELS * _NVLS_TREE[name][place]) if topology.hosts > 1 else 0.0


def _latency(topology: Topology, algorithm: str, protocol: int) -> float:
    """Return what NCCL reckons beside bytes, microseconds."""
    kind = "NVLINK" if topology.inside is None or topology.inside.kind in ("nvlink", "nvswitch") else "PCI"
    inside, network = _HOPS[kind][algorithm][protocol], _HOPS["NET"][algorithm][protocol]
    base, hosts, ranks = _BASE[algorithm][protocol], topology.hosts, topology.ranks
    if algorithm == "Ring":
        across = 2 * hosts if hosts > 1 else 0
        return base + (2 * (ranks - 1) - across) * inside + across * network
    if algorithm == "Tree":
        return base + 2 * ((ranks / hosts - 1) * inside + math.log2(hosts) * network)
    return base + inside + (2 * math.log2(hosts) * network if hosts > 1 else 0.0)

"""What NCCL's own tuner computes: its constants as seconds, and at which sizes it changes algorithm or protocol.

The tuner needs its times only to compare; taken as seconds they are a baseline. Where it changes its choice they are
what decides, so the sizes of the changes are known before anything is measured.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

from ringside.predict.laws.bumps import Floats
from ringside.predict.tables.table import ALL_REDUCE
from ringside.predict.topology.topology import Topology

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


ALGORITHMS = ("Ring", "Tree", "NVLS", "NVLSTree")
PROTOCOLS = 3  # LL, LL128, Simple


def nccl_constants(topology: Topology, requested: ArrayLike) -> Floats:
    """Return the times that NCCL's tuner computes for its own choice: the least over algorithms and protocols.

    Bandwidths per channel and efficiencies are NCCL's, link rates the topology's.

    Args:
        topology: Its rates; `nvls` tells Hopper and Blackwell from what came before.
        requested: Bytes, [m].

    Returns:
        Seconds, float64 [m].
    """
    least: Floats = np.min(_tuned(topology, np.asarray(requested, dtype=np.float64)), axis=0)
    return least


def switches(topology: Topology, collective: str = ALL_REDUCE) -> tuple[float, ...]:
    """Return log2 of the sizes in bytes at which the tuner goes from LL straight to Simple inside one host.

    LL sends a flag with every 4 bytes and has the least latency, Simple whole buffers and the most: measured times jump
    there, and where LL128 lies between them they do not. Among hosts the sizes are off by a factor of 2 and more.
    """
    if topology.hosts > 1 or collective not in (ALL_REDUCE, "all_gather", "reduce_scatter"):
        return ()
    grid = np.arange(8.0, 36.0, 1 / 16)
    protocol = np.argmin(_tuned(topology, 2.0**grid, collective), axis=0) % PROTOCOLS
    return tuple(float(x) for x in grid[1:][(protocol[:-1] == 0) & (protocol[1:] == 2)] - 1 / 32)


def _tuned(topology: Topology, sizes: Floats, collective: str = ALL_REDUCE) -> Floats:
    """Return the tuner's times, infinite for what is not possible, seconds, float64 [ways, n]."""
    found = np.full((len(ALGORITHMS) * PROTOCOLS, len(sizes)), np.inf)
    once = 1 if collective == ALL_REDUCE else 2  # all-gather and reduce-scatter go once round the ring
    for way in range(len(found)):
        algorithm, protocol = ALGORITHMS[way // PROTOCOLS], way % PROTOCOLS
        full = _rate(topology, algorithm, protocol)
        if full <= 0 or (once == 2 and algorithm != "Ring"):
            continue
        rate = np.full(len(sizes), full * once)
        if algorithm == "Tree":
            place = np.clip(np.floor(np.log2(np.maximum(sizes / 64, 1))), 0, 23).astype(int)
            rate *= np.array(_CORRECTION[protocol], dtype=np.float64)[place]
        base = _BASE[algorithm][protocol]
        latency = base + (_latency(topology, algorithm, protocol) - base) / once
        found[way] = (latency + sizes / (1e3 * rate)) * 1e-6
    return found


def _rate(topology: Topology, algorithm: str, protocol: int) -> float:
    """Return the algorithm bandwidth, GB/s; 0 where the topology does not allow the algorithm."""
    name = "Ampere"
    if topology.nvls is not None:
        name = "Blackwell" if topology.nvls.bytes_per_s > 400e9 else "Hopper"
    place = min(topology.hosts, 3) - 1  # 1, 2, more hosts
    inside = topology.inside.bytes_per_s / 1e9 if topology.inside is not None else math.inf
    link = topology.between if topology.hosts > 1 else None
    between = topology.nics * link.bytes_per_s / 1e9 if link is not None else math.inf
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

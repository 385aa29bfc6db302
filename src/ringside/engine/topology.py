"""The host's cores, caches and memory as the kernel describes them, and what they say about ranks.

Nothing is bound here: a job decides where its ranks run. What is read says which ranks are near each other (`domains`),
and in which order a benchmark fills cores (`spread`).
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Cpu:
    """A CPU as the kernel counts them: one hardware thread.

    Args:
        cpu: Its number.
        core: The lowest CPU of its core: SMT siblings have the same.
        cache: The lowest CPU that shares its last-level cache.
        node: Its NUMA node.
    """

    cpu: int
    core: int
    cache: int
    node: int


Place = tuple[int, int]
"""The (NUMA node, last-level cache) that a rank stays in; -1: it may run in several."""


def read_cpus(cpus: Iterable[int], system: Path = SYSTEM) -> list[Cpu]:
    """Return what the kernel says of CPUs, in ascending order.

    What it does not say is taken to be shared by all (a cache, a node) or by nobody (a core). Each CPU is read once in
    a process: 256 of them take 27 ms.

    Args:
        cpus: Their numbers.
        system: Its folder of devices; another one pretends another machine.
    """
    return [_read_cpu(cpu, system) for cpu in sorted(cpus)]


@functools.cache
def _read_nodes(system: Path) -> dict[int, int]:
    """Return the NUMA node of each CPU of which the kernel tells it."""
    return {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in sorted((system / "node").glob("node[0-9]*/cpulist"))
        for cpu in _listed(path)
    }


@functools.cache
def _read_cpu(cpu: int, system: Path) -> Cpu:
    folder = system / f"cpu/cpu{cpu}"
    siblings = _listed(folder / "topology/core_cpus_list") or _listed(folder / "topology/thread_siblings_list") or [cpu]
    # Of the highest level: instructions have no cache of their own there.
    caches = [(path.read_text().strip(), path.parent) for path in folder.glob("cache/index[0-9]*/level")]
    shared = _listed(max(caches, key=lambda found: int(found[0]))[1] / "shared_cpu_list") if caches else []
    return Cpu(cpu, min(siblings), min(shared, default=0), _read_nodes(system).get(cpu, 0))


def _listed(path: Path) -> list[int]:
    """Return the CPUs of a list such as `0-3,8`; none where there is no such file."""
    try:
        parts = [part.partition("-") for part in path.read_text().strip().split(",") if part]
    except OSError:
        return []
    return [cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1)]


def place_of(cpus: Sequence[Cpu]) -> Place:
    """Return where a rank stays that may run on these CPUs."""
    nodes, caches = {cpu.node for cpu in cpus}, {cpu.cache for cpu in cpus}
    return (min(nodes) if len(nodes) == 1 else -1, min(caches) if len(caches) == 1 else -1)


def domains(places: Sequence[Place]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of every NUMA node, or where all are on one, of every last-level cache.

    Returns:
        () where that says nothing: some rank may run in several, or all are in one, or each in one of its own.
    """
    for level in zip(*places, strict=True):
        groups: dict[int, list[int]] = {}
        for rank, where in enumerate(level):
            groups.setdefault(where, []).append(rank)
        if -1 not in groups and 1 < len(groups) < len(level):
            return tuple(tuple(ranks) for ranks in groups.values())
    return ()


def spread(cpus: Sequence[Cpu]) -> list[int]:
    """Return CPUs in the order in which ranks are to fill them: a thread of every core first, near ones together."""
    cores: dict[int, list[int]] = {}
    for cpu in cpus:
        cores.setdefault(cpu.core, []).append(cpu.cpu)
    return [c.cpu for c in sorted(cpus, key=lambda c: (cores[c.core].index(c.cpu), c.node, c.cache, c.core))]


def cache_bytes(caches: Path = SYSTEM / "cpu/cpu0/cache") -> int:
    """Return the size of the largest cache in bytes (32 MiB where the system has no figure).

    Args:
        caches: Where the kernel describes a core's caches.
    """
    best = 0
    for path in caches.glob("index*/size"):  # such as "32K" or "16M"
        text = path.read_text().strip()
        unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        best = max(best, int(text.rstrip("KM") or 0) * unit)
    return best or 32 << 20


# -------------------------------------------------------------------------------------------------
# How many cores this process may really use.

CGROUP = Path("/sys/fs/cgroup")
"""Where control groups are mounted (version 2: `cpu.max`; version 1: `cpu/cpu.cfs_quota_us`)."""


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Return the number of cores: those it may run on, or fewer where its container has a CPU quota."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota(cgroup)
    return max(math.ceil(quota), 1) if quota < allowed else allowed


def cpu_quota(cgroup: Path = CGROUP) -> float:
    """Return how many CPUs' time this process's container may use at most; infinity where it has no quota."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        share = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max": no quota
        return math.inf
    return share if share > 0 else math.inf  # version 1 writes -1: none

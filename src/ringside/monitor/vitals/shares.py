"""Vitals as shares of a rank's own time: one number per row, comparable between ranks and times.

A rank that waits for others neither runs nor wants to, so what kept it from working is a share of its *own* time, as
its excess is. Every function takes vitals and the share of the time that each rank is blocked in synchronisation,
float64 [ranks], and returns float64 [rows], NaN where it is not known.
"""

from __future__ import annotations

import numpy as np

from ringside.monitor.run.table import VitalsTable
from ringside.monitor.stats import Floats

FAULT_SECONDS = 1e-4
"""A page from a fast disk takes about this long; from a slow one it takes longer, and the rank is seen to sleep."""
LEAST_OWN = 0.05
"""A rank's own time is taken to be at least this share of its time."""


def throttled(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time throttled by a CPU quota; 0 where there is none."""
    return _of_own(np.nan_to_num(vitals["throttled_seconds"]), vitals, synced)


def waited(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time ready to run without a CPU, without what the quota took (most kernels count it here as well)."""
    waited = np.maximum(vitals["waited_seconds"] - np.nan_to_num(vitals["throttled_seconds"]), 0.0)
    return _of_own(waited, vitals, synced)


def held(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time in which it wanted a CPU and had none: because of a quota, or of what else ran."""
    return _of_own(np.fmax(vitals["waited_seconds"], vitals["throttled_seconds"]), vitals, synced)


def stolen(vitals: VitalsTable, synced: Floats) -> Floats:
    """Share of the time its CPUs had work in which the hypervisor gave them to others."""
    return vitals["steal_ratio"]


def stalled(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time in which some task of its cgroup, or of the machine, stood still for want of memory."""
    return vitals["memory_stalled_seconds"] / vitals["seconds"]


def faults(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time that its major page faults took at least."""
    return _of_own(vitals["major_faults"] * FAULT_SECONDS, vitals, synced)


def asleep(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time in which the thread neither ran nor wanted to, outside synchronisation."""
    wanted = vitals["ran_seconds"] + np.fmax(vitals["waited_seconds"], vitals["throttled_seconds"])  # as held
    return _of_own(vitals["seconds"] * (1.0 - synced[vitals.owners]) - wanted, vitals, synced)


def fault_rate(vitals: VitalsTable, synced: Floats) -> Floats:
    """Major page faults per second of own time."""
    return vitals["major_faults"] / _own_seconds(vitals, synced)


def _of_own(seconds: Floats, vitals: VitalsTable, synced: Floats) -> Floats:
    return np.clip(seconds / _own_seconds(vitals, synced), 0.0, 1.0)


def _own_seconds(vitals: VitalsTable, synced: Floats) -> Floats:
    return vitals["seconds"] * np.maximum(1.0 - synced[vitals.owners], LEAST_OWN)

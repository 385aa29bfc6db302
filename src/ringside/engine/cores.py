"""How many cores this process may really use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores: those it may run on, or fewer where its container has a CPU quota.

    Args:
        cgroup: Where control groups are mounted (version 2: `cpu.max`; version 1: `cpu/cpu.cfs_quota_us`).
    """
    allowed = len(os.sched_getaffinity(0))
    quota = _quota(cgroup)
    return max(min(allowed, math.ceil(quota)), 1) if quota > 0 else allowed


def _quota(cgroup: Path) -> float:
    """Return the quota in cores; 0 where there is none."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        return max(int(quota) / int(period), 0.0)
    except (OSError, ValueError, ZeroDivisionError):  # "max": no quota
        return 0.0

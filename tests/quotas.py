"""A cgroup with a CPU quota, for tests that hold a real process back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ringside.errors import UnsupportedError
from ringside.faults.quota import CpuQuota


@contextlib.contextmanager
def quota_or_skip(cpus: float) -> Iterator[CpuQuota]:
    """Yield a fresh cgroup with a quota; skip the test where none can be made."""
    try:
        quota = CpuQuota(cpus)
    except UnsupportedError as error:
        pytest.skip(str(error))
    try:
        yield quota
    finally:
        quota.close()

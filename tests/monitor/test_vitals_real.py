"""Vitals of real processes in real trouble: a CPU quota, a neighbour on the same core, pages that come from a disk.

Every assertion has one direction: the trouble is seen. On a machine that others use, too, there may be more of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.quotas import quota_or_skip

from ringside.faults.quota import CpuQuota


@pytest.fixture
def quota() -> Iterator[CpuQuota]:
    with quota_or_skip(cpus=0.05) as quota:
        yield quota


def ask(what: str, *words: object) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).parent / "scripts" / "vitals_of.py"), what, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    content: dict[str, Any] = json.loads(ended.stdout)
    return content


def test_a_real_quota(quota: CpuQuota) -> None:
    vitals = ask(
        "quota",
        quota.members,
    )
    assert vitals["quota_cpus"] == pytest.approx(0.05)
    assert vitals["throttled_seconds"] > 0.2 * vitals["seconds"]
    assert vitals["cpu_seconds"] < 0.5 * vitals["seconds"]


def test_a_real_neighbour_on_the_same_core() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel keeps no schedstat")
    vitals = ask("neighbour")
    assert vitals["cpus"] == 1
    assert vitals["waited_seconds"] > 0.25 * vitals["seconds"]
    assert vitals["preemptions"] > 0
    assert vitals["throttled_seconds"] is None or vitals["throttled_seconds"] < 0.1 * vitals["seconds"]


def test_real_pages_from_a_disk(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    with file.open("wb") as out:
        out.write(os.urandom(1 << 16) * 256)
        out.flush()
        os.fsync(out.fileno())
    vitals = ask(
        "pages",
        file,
    )
    if not vitals:
        pytest.skip(f"{tmp_path} is not on a disk")
    assert vitals["major_faults"] >= 100

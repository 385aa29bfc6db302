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
from tests.quotas import Quota, quota_or_skip

PRELUDE = """
import json, mmap, os, resource, sys, time
from ringside.monitor.vitals import VitalSigns

def burn(cpu_seconds, longest=20.0):
    until, late = time.thread_time() + cpu_seconds, time.monotonic() + longest
    while time.thread_time() < until and time.monotonic() < late:
        sum(range(1000))

def tell(signs):
    vitals = signs.since()
    print(json.dumps({name: getattr(vitals, name) for name in vitals.__struct_fields__}))
"""


@pytest.fixture
def quota() -> Iterator[Quota]:
    with quota_or_skip(cpus=0.05) as quota:
        yield quota


def ask(code: str, *words: object) -> dict[str, Any]:
    command = [sys.executable, "-c", PRELUDE + code, *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    content: dict[str, Any] = json.loads(ended.stdout)
    return content


def test_a_real_quota(quota: Quota) -> None:
    vitals = ask(
        """
open(sys.argv[1], "w").write(str(os.getpid()))
signs = VitalSigns()
burn(0.06)
tell(signs)
""",
        quota.members,
    )
    assert vitals["quota_cpus"] == pytest.approx(0.05)
    assert vitals["throttled_seconds"] > 0.2 * vitals["seconds"]
    assert vitals["cpu_seconds"] < 0.5 * vitals["seconds"]


def test_a_real_neighbour_on_the_same_core() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel keeps no schedstat")
    vitals = ask(
        """
core = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {core})
neighbour = os.fork()
if neighbour == 0:
    burn(30.0)
    os._exit(0)
try:
    signs = VitalSigns()
    burn(0.3)
    tell(signs)
finally:
    os.kill(neighbour, 9)
    os.waitpid(neighbour, 0)
"""
    )
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
        """
fd = os.open(sys.argv[1], os.O_RDONLY)
signs = VitalSigns()
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
pages = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
pages.madvise(mmap.MADV_RANDOM)
before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
for place in range(0, len(pages), 16 * mmap.PAGESIZE):
    pages[place]
if resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before < 100:
    print("{}")  # a file system that lives in memory
else:
    tell(signs)
""",
        file,
    )
    if not vitals:
        pytest.skip(f"{tmp_path} is not on a disk")
    assert vitals["major_faults"] >= 100

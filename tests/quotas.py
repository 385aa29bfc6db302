"""A cgroup of our own with a CPU quota, version 1 or 2, for tests that hold a real process back."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PERIOD_US = 100_000


class Quota(NamedTuple):
    """Args:
    members: The file to write process ids to.
    home: The same of the cgroup above, to move them back to.
    """

    members: Path
    home: Path

    def hold(self, pid: int) -> None:
        self.members.write_text(str(pid))

    def release(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # it may have ended
            self.home.write_text(str(pid))


@contextlib.contextmanager
def quota_or_skip(cpus: float) -> Iterator[Quota]:
    """Yield a fresh cgroup with a quota; skip the test where none can be made."""
    directory = None
    try:
        directory, home = _make(cpus)
    except OSError as error:
        pytest.skip(f"no cgroup with a CPU quota can be made here: {error}")
    try:
        yield Quota(directory / "cgroup.procs", home / "cgroup.procs")
    finally:
        _remove(directory, home)


def _make(cpus: float) -> tuple[Path, Path]:
    home = next((path for path in _homes() if os.access(path, os.W_OK)), None)
    if home is None:
        raise OSError("no cgroup hierarchy with the cpu controller is writable")
    directory = home / f"ringside-test-{os.getpid()}"
    directory.mkdir()
    try:
        if (directory / "cpu.max").exists():
            (directory / "cpu.max").write_text(f"{round(cpus * PERIOD_US)} {PERIOD_US}")
        else:
            (directory / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (directory / "cpu.cfs_quota_us").write_text(str(round(cpus * PERIOD_US)))
    except OSError:
        directory.rmdir()
        raise
    return directory, home


def _homes() -> Iterator[Path]:
    """Yield directories in which a cgroup with a quota may be made: this process's own, or the top."""
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            yield from (Path(f"/sys/fs/cgroup/{name}{path}") for name in ("cpu", "cpu,cpuacct"))
        elif not controllers:
            own = Path(f"/sys/fs/cgroup{path}")
            with contextlib.suppress(OSError):
                if "cpu" in (own / "cgroup.subtree_control").read_text().split():
                    yield own


def _remove(directory: Path, home: Path) -> None:
    deadline = time.monotonic() + 10.0
    while directory.exists():
        with contextlib.suppress(OSError):
            for pid in (directory / "cgroup.procs").read_text().split():
                (home / "cgroup.procs").write_text(pid)
        with contextlib.suppress(OSError):
            directory.rmdir()
        if time.monotonic() > deadline:
            raise AssertionError(f"{directory} cannot be removed")
        time.sleep(0.01)  # members that end give no event to wait for

"""A CPU quota on a process: a cgroup of its own, version 1 or 2; of one that was killed the next removes it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

from ringside.errors import UnsupportedError

PERIOD_US = 100_000
PREFIX = "ringside-quota-"
TRIES = 200


class CpuQuota:
    """A cgroup whose processes may use so many CPUs together.

    Args:
        cpus: Such as 0.6.

    Attributes:
        members: The file that takes the number of a process to hold.
        home: The same of the cgroup above, which lets it go.

    Raises:
        UnsupportedError: No such cgroup can be made here.
    """

    def __init__(self, cpus: float) -> None:
        remove_leftovers()
        home = next((home for home in homes() if os.access(home, os.W_OK)), None)
        if home is None:
            raise UnsupportedError("a CPU quota needs a cgroup with the cpu controller that may be written to")
        try:
            directory = Path(mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=home))
        except OSError as error:
            raise _refused(error) from None
        self.members, self.home = directory / "cgroup.procs", home / "cgroup.procs"
        try:
            if (directory / "cpu.max").exists():
                (directory / "cpu.max").write_text(f"{round(cpus * PERIOD_US)} {PERIOD_US}")
            else:
                (directory / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (directory / "cpu.cfs_quota_us").write_text(str(round(cpus * PERIOD_US)))
        except OSError as error:
            self.close()
            raise _refused(error) from None

    def close(self) -> None:
        """Let all processes go, and remove the cgroup."""
        for _ in range(TRIES):
            with contextlib.suppress(OSError):
                for pid in self.members.read_text().split():
                    self.home.write_text(pid)
            with contextlib.suppress(OSError):
                self.members.parent.rmdir()
            if not self.members.parent.exists():
                return
            time.sleep(0.01)  # members that end give no event to wait for


def unavailable() -> str:
    """Return why no quota can be had here, in one line; "" if it can be."""
    try:
        CpuQuota(1.0).close()
    except UnsupportedError as error:
        return str(error)
    return ""


def remove_leftovers() -> None:
    """Remove the cgroups of processes that have ended without."""
    for home in homes():
        for directory in home.glob(f"{PREFIX}*"):
            pid = directory.name.removeprefix(PREFIX).partition("-")[0]
            if not Path("/proc", pid).exists():
                with contextlib.suppress(OSError):
                    directory.rmdir()


def homes() -> Iterator[Path]:
    """Yield directories in which a cgroup with a quota may be made: this process's own, in either version."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpu" in controllers.split(","):
                yield from (Path(f"/sys/fs/cgroup/{name}{path}") for name in ("cpu", "cpu,cpuacct"))
            elif not controllers:
                own = Path(f"/sys/fs/cgroup{path}")
                with contextlib.suppress(OSError):
                    if "cpu" in (own / "cgroup.subtree_control").read_text().split():
                        yield own


def _refused(error: OSError) -> UnsupportedError:
    return UnsupportedError(f"no cgroup with a CPU quota can be made here: {error}")

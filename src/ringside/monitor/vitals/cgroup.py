"""The CPU quota that a process lives under, and how long it stood still because of it: cgroup v1 and v2.

A quota of any cgroup above stops the process as well, so all of them that can be seen are read, and the one that
stopped it longest counts. A process may be moved while it runs: where it lives is read every time.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# -------------------------------------------------------------------------------------------------
# Small files of the kernel that are read again and again: kept open, and simply absent where they cannot be read.

_LARGEST_BYTES = 1 << 18


class KeptFile:
    """A file of `/proc` or a cgroup; every `read` returns its content now.

    Args:
        path: Which one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def read(self) -> str | None:
        """Return its text; None where it is missing, gone or not for us to read."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._fd, _LARGEST_BYTES, 0).decode(errors="replace")
        except OSError:
            self.close()
            return None

    def close(self) -> None:
        """Give the descriptor back; the next `read` opens the file anew."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse_figures(text: str | None) -> dict[str, int]:
    """Return lines of `name number` as a dict; whatever is not of that form is left out."""
    found: dict[str, int] = {}
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) == 2 and (number := as_number(words[1])) is not None:
            found[words[0]] = number
    return found


def as_number(text: str) -> int | None:
    """Return a whole number in text; None where it is none."""
    try:
        return int(text)
    except ValueError:
        return None


class QuotaReading(NamedTuple):
    """What a CPU quota did since it was last read.

    Args:
        throttled_seconds: How long its CPUs stood still, summed over CPUs.
        cpus: The quota, in CPUs.
    """

    throttled_seconds: float
    cpus: float


class CpuCgroup:
    """Reads the quotas of a process's cgroups.

    Args:
        root: What `/` is (tests give a tree of their own).
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._where = KeptFile(root / "proc/self/cgroup")
        self._mounts = _read_mounts(KeptFile(root / "proc/self/mountinfo"))
        self._text: str | None = None
        self._levels: list[_Level] = []

    def read(self) -> QuotaReading | None:
        """Return the quota that stopped this process longest since the last call; None where there is no quota."""
        text = self._where.read()
        if text != self._text:
            self._text = text
            self._move(list(self._directories(text or "")))
        quotas = [quota for level in self._levels if (quota := level.read()) is not None]
        return max(quotas, default=None, key=lambda quota: (quota.throttled_seconds, -quota.cpus))

    def memory_pressure(self) -> Path | None:
        """Return the file with the memory pressure of this process's own cgroup, where there is one (v2)."""
        own = self._directories(self._text or "")
        files = (directory / "memory.pressure" for version, directory in own if version == 2)
        return next(filter(Path.exists, files), None)

    def close(self) -> None:
        """Give the descriptors back."""
        self._where.close()
        self._move([])

    def _move(self, directories: list[tuple[int, Path]]) -> None:
        for level in self._levels:
            level.close()
        self._levels = [_Level(version, directory) for version, directory in directories]

    def _directories(self, text: str) -> Iterator[tuple[int, Path]]:
        """Yield the version and directory of every visible cgroup from its own up to the mounted one."""
        for line in text.splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            version = 2 if number == "0" and not controllers else 1 if "cpu" in controllers.split(",") else 0
            if version not in self._mounts:
                continue
            root, point = self._mounts[version]
            # Relative paths of the cgroup and those above it; only the mounted one if it lies outside of what is seen.
            top = PurePosixPath(point.lstrip("/"))
            parts = [top]
            with contextlib.suppress(ValueError):
                inside = PurePosixPath(path).relative_to(root)
                if ".." not in inside.parts:
                    parts = [top / inside, *(top / above for above in inside.parents)]
            yield from ((version, self._root / part) for part in parts)


def _read_mounts(file: KeptFile) -> dict[int, tuple[str, str]]:
    """Return which cgroup that can bound CPU time is mounted where, by version, from `/proc/self/mountinfo`."""
    text = file.read() or ""
    file.close()
    mounts: dict[int, tuple[str, str]] = {}
    for line in text.splitlines():
        # Of each line: `... root point ... - kind source options` (proc_pid_mountinfo(5)).
        ahead, separator, behind = line.partition(" - ")
        fields, kind = ahead.split(" "), behind.split(" ")
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        version = 2 if kind[0] == "cgroup2" else 1 if kind[0] == "cgroup" and "cpu" in kind[2].split(",") else 0
        if version:
            mounts.setdefault(version, (_unescape(fields[3]), _unescape(fields[4])))
    return mounts


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes of spaces, tabs, newlines and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), text)


class _Level:
    """One cgroup."""

    def __init__(self, version: int, directory: Path) -> None:
        self._stat = KeptFile(directory / "cpu.stat")
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        self._bounds = [KeptFile(directory / name) for name in names]
        self._before: float | None = None

    def read(self) -> QuotaReading | None:
        """Return what happened since the last call; 0 seconds the first time; None where it has no quota."""
        before, self._before = self._before, None
        # `cpu.max` has both figures of v2, the two files of v1 one each: microseconds of CPU in every period.
        words: list[str] = []
        for file in self._bounds:
            words += (file.read() or "").split()
            if not words or words[0] in ("max", "-1"):
                return None
        quota, period = (as_number(word) for word in words) if len(words) == 2 else (None, None)
        if not quota or not period:
            return None
        known = parse_figures(self._stat.read())
        if "throttled_usec" in known:
            self._before = known["throttled_usec"] / 1e6
        elif "throttled_time" in known:
            self._before = known["throttled_time"] / 1e9
        else:
            return None
        return QuotaReading(0.0 if before is None else max(self._before - before, 0.0), quota / period)

    def close(self) -> None:
        for file in (self._stat, *self._bounds):
            file.close()

"""Which runs are going on this machine: one small file per run, so that views find them from another shell.

The files lie in a directory of this user's alone (`$XDG_RUNTIME_DIR/ringside`, else `/tmp/ringside-UID`), are named
after the process that writes the run, and are left out (and removed) once that process is gone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.files import replace_file
from ringside.processes import is_running, start_time


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is going on.

    Args:
        path: Its run directory, absolute; bytes, since names need not be text.
        pid: The process that writes it.
        born: When that process was started, in the kernel's clock ticks since boot: pids are used again.
        started_unix: When the run began, seconds since 1970.
        world_size: Number of ranks.
    """

    path: bytes
    pid: int
    born: int
    started_unix: float
    world_size: int

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(os.fsdecode(self.path))


def register(path: Path, world_size: int, started_unix: float) -> Path | None:
    """Register that this process writes a run; return the file to give to `unregister`, None where that failed."""
    pid = os.getpid()
    entry = Entry(
        path=os.fsencode(path.absolute()),
        pid=pid,
        born=start_time(pid),
        started_unix=started_unix,
        world_size=world_size,
    )
    directory = registry_directory()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_ours(directory):
            return None
        file = directory / f"{pid}.json"
        replace_file(file, msgspec.json.encode(entry))
    except OSError:
        return None
    return file


def unregister(file: Path | None) -> None:
    """Remove what `register` wrote."""
    if file is not None:
        with contextlib.suppress(OSError):
            file.unlink()


def running_runs() -> list[Entry]:
    """Return the runs that are going on, the newest first; what dead processes left is removed."""
    directory = registry_directory()
    found = []
    if _is_ours(directory):
        for file in directory.glob("*.json"):
            try:
                entry = msgspec.json.decode(file.read_bytes(), type=Entry)
            except (OSError, *UNDECODABLE):
                entry = None
            if entry is None or not is_running(entry.pid, entry.born):
                unregister(file)
            else:
                found.append(entry)
    return sorted(found, key=lambda entry: -entry.started_unix)


def registry_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return where this user's runs are registered."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "ringside"
    return Path(tempfile.gettempdir()) / f"ringside-{os.getuid()}"


def _is_ours(directory: Path) -> bool:
    """Whether a directory belongs to this user alone: /tmp is everybody's."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022

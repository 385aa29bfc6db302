"""The rings of a host's ranks, followed while a job runs."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from ringside.errors import RingsideError, UnsupportedError
from ringside.monitor.nccl.calls import Calls
from ringside.monitor.nccl.causes import Blame, Causes
from ringside.monitor.nccl.report import NcclReport
from ringside.monitor.nccl.ring import PREFIX, Ring
from ringside.monitor.run.directory import open_regular
from ringside.processes import is_running, start_time
from ringside.text import first_line

PLUGIN_VARIABLE = "NCCL_PROFILER_PLUGIN"
READ_SECONDS, _FULL = 8.0, 0.25
"""Rings are read so often, or when one is so full; reading rarely costs least."""
_CONF_BYTES = 1 << 20
_LOOK_S = 1.0
"""New ones are looked for so often."""
_log = logging.getLogger(__name__)


class NcclWatch:
    """Follows the rings in a folder; each is removed when its process has ended and all of it was read.

    Args:
        folder: Where the plugin makes them.

    Attributes:
        records: How many events were read.
        global_ranks: Whose rings were seen, as far as that is known.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rings: dict[Path, tuple[Ring, Calls]] = {}
        self._refused: set[Path] = set()
        self._causes = Causes()
        self._processes = self._interface = self._dropped = self._torn = 0
        self._next = self._next_look = 0.0
        self.records = 0
        self.global_ranks: set[int] = set()

    def is_due(self, now: float) -> bool:
        """Return whether to read: some seconds have passed since the last time, or a ring fills up; that costs nothing.

        Args:
            now: The monotonic clock, seconds.
        """
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._find_rings()
        return now >= self._next or any(ring.filled_ratio >= _FULL for ring, _ in self._rings.values())

    def _find_rings(self, *, is_last: bool = False) -> None:
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(self._folder) if name.startswith(PREFIX)]
        for path in map(self._folder.joinpath, names):
            if path not in self._rings and path not in self._refused:
                try:
                    self._rings[path] = Ring(path), Calls()
                    self._processes += 1
                    self.global_ranks.add(self._rings[path][0].global_rank)
                except UnsupportedError as error:
                    _log.warning("%s", str(error))
                    self._refused.add(path)
                except (RingsideError, OSError) as error:  # or its process is just making it
                    if is_last:
                        _log.warning("%s", str(error))

    def poll(self, *, is_last: bool = False) -> None:
        """Read what is new.

        Args:
            is_last: The job is over.
        """
        self._next = time.monotonic() + READ_SECONDS
        self._find_rings(is_last=is_last)
        for path, (ring, calls) in list(self._rings.items()):
            alive = not is_last and (ring.has_news or ring.is_alive())
            is_over = is_last or not alive
            try:
                with ring.taken_out(alive or ring.is_alive()) as records:
                    self.records += len(records)
                    joined = calls.add(records, time.monotonic_ns(), is_last=is_over)
            except RingsideError as error:
                _log.warning("%s", str(error))
                self._refused.add(path)
                del self._rings[path]
                continue
            self._causes.add(ring.communicator, ring.global_rank, joined)
            self._interface = max(self._interface, ring.interface)
            if is_over:
                self._dropped += ring.dropped
                self._torn += ring.torn
                del self._rings[path]
                path.unlink(missing_ok=True)
        self._causes.compare()

    def why_silent(self, environ: Mapping[str, str]) -> str:
        """Return why nothing may have been recorded, as far as rings and NCCL's log tell.

        Args:
            environ: Of the ranks.
        """
        if self._refused:
            return "what NCCL's plugin wrote cannot be read by this Ringside, as was said"
        if self._processes:
            return "NCCL has opened the plugin, but no collective of several ranks was called"
        # %h and %p in its name are the host and the process
        name = re.sub("%[hp]", "*", environ.get("NCCL_DEBUG_FILE", ""))
        for path in glob.glob(name) if name else []:
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                told = [line for line in file if "PROFILER" in line or "profiler plugin" in line]
                if told:
                    return f"NCCL's log says {first_line(told[-1])}"
        return (
            "no communicator was made yet, or this NCCL is older than 2.27 or does not know the plugin's interface "
            "(v4 to v6); NCCL_DEBUG=INFO shows what it says of PROFILER"
        )

    def blames(self) -> list[Blame]:
        """Return who holds the job up so far, the costliest first."""
        return self._causes.blames()

    def report(self) -> NcclReport:
        """Return what was told so far."""
        return NcclReport(
            processes=self._processes,
            interface=self._interface,
            records=self.records,
            dropped=self._dropped + sum(ring.dropped for ring, _ in self._rings.values()),
            torn=self._torn,
            blames=self.blames(),
            communicators=self._causes.seen(),
        )


def plugin_of_user(environ: Mapping[str, str], system_file: Path = Path("/etc/nccl.conf")) -> tuple[str, str]:
    """Return the profiler plugin that a user has chosen already, and where; empty: none.

    NCCL takes what the environment does not set from the file that NCCL_CONF_FILE names, else from ~/.nccl.conf, and
    then from the system's; what is set in ours would hide that.

    Args:
        environ: Of the ranks.
        system_file: The system's.
    """
    if plugin := environ.get(PLUGIN_VARIABLE):
        return plugin, "the environment"
    named = environ.get("NCCL_CONF_FILE")
    for path in (Path(named) if named else Path("~/.nccl.conf").expanduser(), system_file):
        with contextlib.suppress(OSError), open_regular(path) as file:
            for line in file.read(_CONF_BYTES).decode("utf-8", "replace").splitlines():
                name, _, value = line.partition("=")
                if name.strip() == PLUGIN_VARIABLE and value.strip():
                    return value.strip(), str(path)
    return "", ""


def make_folder(parent: Path) -> Path:
    """Make a folder for rings that this process reads; its name says whose it is."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-{start_time(os.getpid())}-", dir=parent))


def remove_left(parent: Path) -> None:
    """Remove this user's folders of rings that nobody reads any more, and no living process writes.

    Args:
        parent: Where they are.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and not any(map(_has_owner, [folder, *folder.iterdir()])):
                shutil.rmtree(folder)


def _has_owner(path: Path) -> bool:
    """Return whether the process lives that a ring's or a folder's name begins with."""
    pid, started, *_ = [*path.name.removeprefix(PREFIX).split("-"), ""]
    return pid.isdecimal() and started.isdecimal() and is_running(int(pid), int(started))

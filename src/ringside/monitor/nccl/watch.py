"""The rings of a host's ranks, followed while a job runs; who holds it up, in words."""

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

import msgspec

from ringside.errors import RingsideError
from ringside.monitor.nccl.calls import Calls
from ringside.monitor.nccl.causes import LEAST_SEEN, NOT_KNOWN, SLOW_LINK, Blame, Causes, Seen
from ringside.monitor.nccl.ring import PREFIX, Ring
from ringside.processes import is_running, start_time
from ringside.text import counted, duration, first_line

FILE = "nccl.json"
"""In the run directory: what came of it."""
PLUGIN_VARIABLE = "NCCL_PROFILER_PLUGIN"
_log = logging.getLogger(__name__)


class NcclReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the plugin has told of the ranks of a host.

    Args:
        processes: How many have recorded.
        interface: The newest version of NCCL's interface that was used; 0: none.
        records: How many events were read.
        dropped: Events for which a ring had no room.
        torn: Records that a process which was killed has not finished.
        blames: Who holds the job up, the costliest first.
        communicators: What is known of each.
    """

    processes: int
    interface: int
    records: int
    dropped: int
    torn: int
    blames: list[Blame]
    communicators: list[Seen]


class NcclWatch:
    """Follows the rings in a folder; each is removed when its process has ended and all of it was read.

    Args:
        folder: Where the plugin makes them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rings: dict[Path, tuple[Ring, Calls]] = {}
        self._refused: set[Path] = set()
        self._causes = Causes()
        self._processes = self._interface = self._dropped = self._torn = 0
        self.records = 0

    def poll(self, *, is_last: bool = False) -> None:
        """Read what is new.

        Args:
            is_last: The job is over.
        """
        for path in self._folder.glob(f"{PREFIX}*"):
            if path not in self._rings and path not in self._refused:
                try:
                    self._rings[path] = Ring(path), Calls()
                    self._processes += 1
                except (RingsideError, OSError) as error:  # or its process is just making it
                    if is_last:
                        _log.warning("%s", error)
        for path, (ring, calls) in list(self._rings.items()):
            is_over = is_last or not ring.is_alive()
            try:
                records = ring.take()
            except RingsideError as error:
                _log.warning("%s", error)
                self._refused.add(path)
                del self._rings[path]
                continue
            self.records += len(records)
            joined = calls.add(records, time.monotonic_ns(), is_last=is_over)
            self._causes.add(ring.communicators, ring.global_rank, joined)
            self._interface = max(self._interface, ring.interface)
            if is_over:
                self._dropped += ring.dropped
                self._torn += ring.torn
                del self._rings[path]
                path.unlink(missing_ok=True)

    def why_silent(self, environ: Mapping[str, str]) -> str:
        """Return why nothing may have been recorded, as far as rings and NCCL's log tell.

        Args:
            environ: Of the ranks.
        """
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


def blame_line(blame: Blame) -> str:
    """Return in one line who holds the job up in NCCL's collectives, and why."""
    seconds = duration(blame.seconds)
    of = f" of communicator {blame.communicator}" if blame.in_communicator else ""
    if blame.cause == SLOW_LINK:
        link = f"from rank {blame.rank} to rank {blame.peer}{of}"
        return f"NCCL: slow link {link}: {seconds} in the steps that were recorded"
    waited = f"the others waited {seconds} for rank {blame.rank}{of}"
    if blame.cause == NOT_KNOWN:
        return f"NCCL: {waited} (whether its host or its GPU is not known)"
    return f"NCCL: {blame.cause}: {waited} (host {duration(blame.host_seconds)}, GPU {duration(blame.gpu_seconds)})"


def report_lines(report: NcclReport) -> list[str]:
    """Return what is to be said of a run's collectives at its end."""
    if not report.records:
        return []
    lines = [blame_line(blame) for blame in report.blames]
    compared = sum(one.calls for one in report.communicators)
    if not lines:
        lines.append(f"NCCL: {counted(compared, 'collective')} compared, nobody holds the others up")
    for one in report.communicators:
        if one.ranks_seen < one.ranks:
            lines.append(
                f"NCCL: of communicator {one.id} {one.ranks_seen} of {one.ranks} ranks were seen here: not compared"
            )
        elif one.seen_ratio < LEAST_SEEN:
            lines.append(
                f"NCCL: a rank of communicator {one.id} was seen in {one.seen_ratio:.0%} of its calls: nobody is named"
            )
    if report.dropped:
        lines.append(f"NCCL: {report.dropped} events were dropped, for which the ring had no room")
    return lines

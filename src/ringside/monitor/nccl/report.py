"""What a run holds of NCCL: what the plugin has told of a host's ranks, in a file and in words, and where logs are."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.monitor.nccl.causes import LEAST_SEEN, NOT_KNOWN, SLOW_LINK, Blame, Seen
from ringside.monitor.run.directory import Event, open_regular
from ringside.text import counted, duration

FILE = "nccl.json"
"""In the run directory: what came of it on the host of rank 0; other hosts' are `nccl-HOST.json`."""
_FILES = "nccl*.json"
MOST_BYTES = 64 << 20


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


def report_files(run_dir: Path) -> list[Path]:
    """Return the files of a run directory that hold such a report, by their names."""
    return sorted(run_dir.glob(_FILES))


def read_reports(run_dir: Path) -> list[NcclReport]:
    """Return what the plugin has told of each host's ranks so far; what is damaged is left out."""
    found = []
    for path in report_files(run_dir):
        try:
            with open_regular(path) as file:
                found.append(msgspec.json.decode(file.read(MOST_BYTES), type=NcclReport))
        except (OSError, *UNDECODABLE):
            continue
    return found


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
    if captured := sum(one.captured for one in report.communicators):
        lines.append(f"NCCL: {counted(captured, 'call')} came from captured graphs, of which no call of a host is told")
    if report.dropped:
        lines.append(f"NCCL: {report.dropped} events were dropped, for which the ring had no room")
    return lines


# -------------------------------------------------------------------------------------------------
# Where a job's NCCL profilers write logs of single collectives, as its environment says.

EVENT = "call_logs"
"""The event of a run that says where: `{"kind": "call_logs", "folder": ...}`."""


def log_folder(environ: Mapping[str, str]) -> str:
    """Return the folder of NCCL's Inspector or of Google's CoMMA, as an absolute path; empty: there is none.

    Args:
        environ: Of the ranks.
    """
    if folder := environ.get("NCCL_INSPECTOR_DUMP_DIR"):
        return os.path.abspath(folder)
    if environ.get("NCCL_INSPECTOR_ENABLE", "0") not in ("", "0"):
        return os.path.abspath(f"nccl-inspector-{environ.get('SLURM_JOBID', 'unknown-jobid')}")
    if file := environ.get("NCCL_PROFILER_LATENCY_FILE"):
        return os.path.dirname(os.path.abspath(file))
    return ""


def read_log_folder(events: Iterable[Event]) -> str:
    """Return the folder that a run's events name last; empty: none."""
    named = [event.get("folder") for event in events if event.get("kind") == EVENT]
    known = [folder for folder in named if isinstance(folder, str) and os.path.isabs(folder) and "\0" not in folder]
    return known[-1] if known else ""

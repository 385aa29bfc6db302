"""Where a job's NCCL profilers write logs of single collectives, as its environment says."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from ringside.monitor.run.directory import Event

EVENT = "call_logs"
"""The event of a run that says where: `{"kind": "call_logs", "folder": ...}`."""


def log_folder(environ: Mapping[str, str]) -> str:
    """Return the folder of NCCL's Inspector or of Google's CoMMA, as an absolute path; empty: there is none.

    Args:
        environ: Of the ranks.
    """
    if folder := environ.get("NCCL_INSPECTOR_DUMP_DIR"):
        return os.path.abspath(folder)
    if file := environ.get("NCCL_PROFILER_LATENCY_FILE"):
        return os.path.dirname(os.path.abspath(file))
    return ""


def read_log_folder(events: Iterable[Event]) -> str:
    """Return the folder that a run's events name last; empty: none."""
    named = [event.get("folder") for event in events if event.get("kind") == EVENT]
    known = [folder for folder in named if isinstance(folder, str) and os.path.isabs(folder) and "\0" not in folder]
    return known[-1] if known else ""

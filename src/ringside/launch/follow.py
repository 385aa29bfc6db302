"""A launched run, watched from outside until it ends: only its directory is read and its processes are counted."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ringside.errors import RingsideError, UsageError
from ringside.files import append_to_file
from ringside.launch.torchrun import Launch, StopRequest, wait_or_stop
from ringside.monitor.run.directory import EVENTS, RUN, RunReader, finite
from ringside.monitor.run.table import tabulate
from ringside.monitor.summary import finish_run
from ringside.monitor.verdict import Verdict
from ringside.processes import Death
from ringside.view.html.run_report import render_report
from ringside.view.run.follower import RunFollower, ShownFinding
from ringside.view.run.live import LiveRun

POLL_S = 0.12
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
DEAD_ADVICE = (
    "Restart from the last checkpoint. A SIGKILL of unknown origin is mostly the kernel's, out of memory: look at "
    "dmesg and at the memory limit of the container (memory.events)."
)

_log = logging.getLogger(__name__)
Show = Callable[[RunFollower, list[ShownFinding]], None]


def choose_directory(requested: Path | None, prefix: str) -> tuple[Path, str]:
    """Return where to write a run, and a warning where that is not what was asked for (else empty).

    A directory that cannot be written never stops a run: a temporary one takes its place.

    Args:
        requested: What the user asked for; None for a new directory under `runs/`.
        prefix: How the new directory's name begins.

    Raises:
        UsageError: There is a run in it already.
    """
    path = requested or Path("runs") / f"{prefix}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if (path / RUN).exists():
        raise UsageError(f"{path} already contains a run; give a new directory with --run-dir, or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path) as probe:  # a full disk or a quota shows only when something is written
            probe.write(b"ringside\n")
        return path, ""
    except OSError as error:
        why = f"{path} cannot be written ({error.strerror or error})"
    try:
        return Path(tempfile.mkdtemp(prefix=f"ringside-{prefix}-")), f"{why}: this run is recorded elsewhere"
    except OSError:
        return path, f"{why}: training goes on, but nothing of it is recorded"


def environment(path: Path) -> dict[str, str]:
    """Return the environment of ranks whose run is to be written to `path` and shown by us."""
    return {**os.environ, "RINGSIDE_RUN_DIR": str(path.absolute()), "RINGSIDE_LAUNCHED": "1"}


def follow_run(launch: Launch, path: Path, stop: StopRequest, show: Show) -> int:
    """Watch until torchrun ends, or end it when asked to; return the exit status.

    Args:
        launch: The running torchrun.
        path: The run directory.
        stop: Whether somebody asked to stop.
        show: Called several times a second with the run as it is and the verdicts that are new.
    """
    live, is_readable = LiveRun(path), True
    status: int | None = None
    while status is None:
        status = wait_or_stop(launch, POLL_S, stop)
        try:
            if is_readable:
                live.poll()
        except UsageError:
            pass  # another run is about to begin in this directory
        except RingsideError as error:
            is_readable = False
            _log.warning("%s: the run goes on and is not shown any more", error)
        show(live.following, live.fresh_findings)
    return stop.exit_status if stop.signum else status


def conclude_run(
    path: Path, deaths: Sequence[Death] = (), extra: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[Verdict]] | None:
    """Write a run's summary and report once its ranks have ended; return the summary and its verdicts.

    Returns None, with a warning, where nothing was recorded or nothing can be written.

    Args:
        path: The run directory.
        deaths: The ranks that ended, first to last; a rank killed by a signal gives a `dead_rank` verdict.
        extra: Parts to pass through to the summary.
    """
    if not (path / RUN).exists():
        return None
    try:
        killed = _find_dead_rank(path, deaths)
        if killed is not None:
            event = {"unix": time.time(), "kind": "verdict", "verdict": msgspec.to_builtins(killed)}
            line = msgspec.json.encode(finite(event))
            append_to_file(path / EVENTS, b"\n" + line + b"\n")  # a torn last line ends here
        summary = finish_run(path, render_report, extra=extra)
    except (RingsideError, OSError) as error:
        _log.warning("the summary of this run is missing: %s", error)
        return None
    return summary, [msgspec.convert(content, Verdict) for content in summary["verdicts"]]


def _find_dead_rank(path: Path, deaths: Sequence[Death]) -> Verdict | None:
    """Return the verdict on a rank that a signal ended before any other rank ended.

    Where the hang watch has named it already, that verdict comes back with what only the parent knows: the signal.
    """
    reader = RunReader(path)
    here = [death for death in deaths if death.pid in reader.info.pids]  # torchrun may have started the ranks anew
    if not here or here[0].signum in (0, *ASKED):
        return None
    death = here[0]
    cause = f"its process {death.pid} was ended by {death.signal_name}"
    known: dict[str, float | int | str] = {"pid": death.pid, "signal": death.signal_name}
    named = []
    for event in reader.poll_events():
        with contextlib.suppress(msgspec.ValidationError, ValueError):  # an event without a verdict
            verdict = msgspec.convert(event.get("verdict"), Verdict)
            named += [verdict] if verdict.kind == "dead_rank" else []
    if named:
        # The hang watch was first. If it named the same rank, its verdict is repeated with the signal.
        same = named[-1].ranks == [death.rank] and "signal" not in named[-1].evidence
        return replace(named[-1], cause=cause, evidence={**named[-1].evidence, **known}) if same else None
    table = tabulate(reader.iterate(), reader.info.world_size)
    last = int(table.steps[-1]) if len(table) else -1
    step = last + table.stride if len(table) else 0  # nobody finishes a step in which a rank died
    return Verdict(
        kind="dead_rank",
        ranks=[death.rank],
        since_step=step,
        detected_step=step,
        excess_ratio=0.0,
        cause=cause,
        evidence={**known, "last_recorded_step": last},
        advice=DEAD_ADVICE,
    )

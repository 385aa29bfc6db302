"""What a job's profilers write of single collectives (Inspector, CoMMA, ClogHook), judged while the job goes on.

A process of its own, of the lowest priority, reads and judges the files as `ringside doctor` does, and ends: nobody
keeps what it read. It ends when the view that began it does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ringside.doctor.findings import Findings
from ringside.text import counted, name_ranks

MOST_FILES = 4096
MOST_CPU_SECONDS = 600
MOST_LINES = 3
MOST_LETTERS = 600
_CHILD = f"import sys; sys.path[:] = sys.argv[3:]; from {__name__} import main; main()"
"""It imports what the view does: with `-m`, a `numpy.py` in the user's working directory would be run."""


def begin_judging(folder: Path, since_unix: float) -> subprocess.Popen[bytes]:
    """Begin to judge a folder beside this process; see `judge_folder`, whose answer comes as JSON on its stdout.

    Raises:
        OSError: No process can be started.
    """
    # nothing is written to its stdin: that closes when this process ends, however it does
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(folder), str(since_unix), *sys.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


def log_files(folder: Path, since_unix: float = 0.0) -> dict[Path, tuple[int, int]]:
    """Return the regular files right in a folder, the first `MOST_FILES` by name; none where it cannot be read.

    Args:
        folder: The folder.
        since_unix: Only files that were written then or later.

    Returns:
        The size of each and when it was last written, by which it is known whether it has changed.
    """
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # gone meanwhile
                status = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False) and status.st_mtime >= since_unix:
                    found[folder / entry.name] = status.st_size, status.st_mtime_ns
    return dict(sorted(found.items())[:MOST_FILES])


def judge_folder(folder: Path, since_unix: float = 0.0) -> tuple[str, ...]:
    """Return what the logs of single collectives in a folder say, in words; nothing where there are none.

    Args:
        folder: The folder.
        since_unix: When the job began.
    """
    from ringside.doctor.calls import clog, comma, inspector  # whoever only asks the child needs none of the readers
    from ringside.doctor.examine import examine

    readers = (inspector, comma, clog)  # what else lies there is not read
    files = log_files(folder, since_unix)
    lines = _describe(examine(list(files), readers=readers), [reader.KIND for reader in readers])
    if lines and len(files) == MOST_FILES:
        lines += (f"of the files in {folder} the first {MOST_FILES:,} by name were read",)
    return lines


def _describe(found: Findings, known: Sequence[str]) -> tuple[str, ...]:
    kinds = [kind for kind in known if any(note.kind == kind and note.used for note in found.notes)]
    if not kinds:
        return ()
    lead = f"{' and '.join(kinds)}s"
    verdicts = [verdict for verdict in found.verdicts if "communicator" in verdict.evidence]
    lines = []
    for verdict in verdicts[:MOST_LINES]:
        who = name_ranks(verdict.ranks) if verdict.kind != "slow_link" else " → ".join(map(str, verdict.ranks))
        lines.append(f"{lead}: {who}: {verdict.cause}" if who else f"{lead}: {verdict.cause}")
    if not lines:
        calls = sum(int(found.facts.get(kind, {}).get("calls", 0)) for kind in kinds)
        unjudged = (f"; {one.what} is not judged: {one.why}" for one in found.unjudged if not one.side)
        lines.append(f"{lead}: {counted(calls, 'call')}{next(unjudged, ', nobody holds the others up')}")
    return tuple(line if len(line) <= MOST_LETTERS else f"{line[: MOST_LETTERS - 1]}…" for line in lines)


def main() -> None:
    """Judge the folder that is named and write the words to stdout; end when stdin does."""
    import resource  # not on every system, and of no use to who asks

    threading.Thread(target=_end_with_stdin, daemon=True).start()
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS))
    with contextlib.suppress(OSError):  # where memory runs out this process is ended, and no rank
        Path("/proc/self/oom_score_adj").write_text("1000")
    sys.stdout.buffer.write(msgspec.json.encode(judge_folder(Path(sys.argv[1]), float(sys.argv[2]))))


def _end_with_stdin() -> None:
    os.read(0, 1)
    os._exit(1)

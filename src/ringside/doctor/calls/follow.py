"""What a job's profilers write of single collectives (Inspector, CoMMA, ClogHook), judged again while the job goes on.

A process of its own, of the lowest priority, reads and judges the files as `ringside doctor` does, and ends: no view
waits for it or keeps what it read. It takes at most a fiftieth of a processor's time.
"""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.doctor.findings import Findings
from ringside.text import counted, name_ranks

LEAST_SECONDS = 10.0
"""Files are judged again at most so often, and ..."""
SHARE = 0.02
"""... so that no larger share of the time is spent on it."""
MOST_FILES = 4096
MOST_CPU_SECONDS = 600
MOST_LINES = 3
MOST_LETTERS = 600


class LogFollower:
    """The logs of single collectives in a folder, while a job writes them.

    Args:
        folder: The folder; nothing below it is read.

    Attributes:
        lines: What they say, in words; empty while nothing is known.
    """

    def __init__(self, folder: Path) -> None:
        self.lines: tuple[str, ...] = ()
        self._folder = folder
        self._child: subprocess.Popen[bytes] | None = None
        self._began = self._next = 0.0
        self._judged: list[tuple[str, int, int]] = []

    def poll(self) -> bool:
        """Have the files judged if they have changed, without waiting for it; return whether `lines` have changed."""
        now = time.monotonic()
        if self._child is not None:
            if self._child.poll() is None:
                return False
            told, _ = self._child.communicate()
            self._child = None
            self._next = now + max(LEAST_SECONDS, (now - self._began) / SHARE)
            lines = self.lines
            with contextlib.suppress(*UNDECODABLE):
                self.lines = msgspec.json.decode(told, type=tuple[str, ...])
            return self.lines != lines
        if now < self._next:
            return False
        self._next = now + LEAST_SECONDS
        files = [(str(path), *_version(path)) for path in log_files(self._folder)]
        if files and files != self._judged:
            self._judged, self._began = files, now
            words = [sys.executable, "-m", __name__, str(self._folder)]
            with contextlib.suppress(OSError):
                self._child = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
                )
        return False

    def close(self) -> None:
        """End what is under way."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None


def log_files(folder: Path) -> list[Path]:
    """Return the regular files right in a folder, by name; none where it cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir())[:MOST_FILES]:
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    found.append(path)
    return found


def judge_folder(folder: Path) -> tuple[str, ...]:
    """Return what the logs of single collectives in a folder say, in words; nothing where there are none."""
    from ringside.doctor.calls import clog, comma, inspector  # whoever only asks the child needs none of the readers
    from ringside.doctor.examine import examine

    return _describe(examine(log_files(folder)), (inspector.KIND, comma.KIND, clog.KIND))


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
        unjudged = [f"; {one.what} is not judged: {one.why}" for one in found.unjudged if not one.side][:1]
        lines.append(f"{lead}: {counted(calls, 'call')}, nobody holds the others up{''.join(unjudged)}")
        if unjudged:
            lines[0] = f"{lead}: {counted(calls, 'call')}{unjudged[0]}"
    return tuple(line if len(line) <= MOST_LETTERS else f"{line[: MOST_LETTERS - 1]}…" for line in lines)


def _version(path: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        status = path.stat()
        return status.st_size, status.st_mtime_ns
    return 0, 0


def main() -> None:
    """Judge the folder that is named and write the words to stdout."""
    import resource  # not on every system, and of no use to who asks

    os.nice(19)
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_SECONDS, MOST_CPU_SECONDS))  # whoever asked may be gone
    sys.stdout.buffer.write(msgspec.json.encode(judge_folder(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()

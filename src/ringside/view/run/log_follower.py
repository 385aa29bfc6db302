"""What a job's profilers write of single collectives, followed while the job goes on: no view ever waits for it."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.doctor.calls.follow import begin_judging, log_files

LEAST_SECONDS = 10.0
"""The folder is looked at again at most so often, and ..."""
SHARE = 0.02
"""... so that no larger share of the time is spent on it."""
STEP_S = 0.1
"""So often it is asked whether the files are judged, ..."""
STEPS_PER_CHECK = 10
"""... and every so many times the folder: whether it still answers."""
SLOW_S = 1.0
"""What the folder takes longer than this to answer is no work of this machine."""
SILENT_S = 30.0
"""So long without an answer of the folder is worth a word, and again whenever `SILENT_STEP_S` more have passed."""
SILENT_STEP_S = 10.0
MOMENT_S = 0.2

Files = Mapping[Path, tuple[int, int]]
"""Size in bytes and time of the last write, nanoseconds since 1970."""


class LogFollower:
    """The logs of single collectives in a folder, while a job writes them.

    A thread looks at the folder and has a process beside judge its files; views take over what is finished. A folder on
    a disk that answers no more (NFS without its server) holds up that thread alone, and there is one at most; where
    nobody polls there is none.

    Args:
        folder: The folder; nothing below it is read.
        since_unix: When the job began: files that were last written before are an earlier one's.
        list_files: Returns the files that are there; it may never return.
        clock: Monotonic time in seconds.

    Attributes:
        lines: What they say, in words; empty while nothing is known.
    """

    def __init__(
        self,
        folder: Path,
        since_unix: float = 0.0,
        *,
        list_files: Callable[[Path, float], Files] = log_files,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lines: tuple[str, ...] = ()
        self._folder, self._since_unix = folder, since_unix
        self._list_files, self._clock = list_files, clock
        self._thread: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()
        # Written by the thread: what the files said last, which files these were, when to look again, and since when
        # the folder has been asked; None: it has answered.
        self._found: tuple[str, ...] = ()
        self._judged: Files = {}
        self._next_s = clock()
        self._asked_s: float | None = None
        self._waited_s = 0.0  # for the folder, in this turn

    def poll(self) -> bool:
        """Take over what is finished, and have the folder looked at again; return whether `lines` have changed."""
        now = self._clock()
        if (self._thread is None or not self._thread.is_alive()) and now >= self._next_s:
            thread = threading.Thread(target=self._judge_anew, name="ringside-logs", daemon=True)
            try:
                thread.start()
                self._thread = thread
            except RuntimeError:  # the system has no thread left
                self._next_s = now + LEAST_SECONDS
        lines, asked_s = self._found, self._asked_s
        if asked_s is not None and now - asked_s >= SILENT_S:
            silent_s = (now - asked_s) // SILENT_STEP_S * SILENT_STEP_S
            lines += (f"the folder of logs has not answered for {silent_s:.0f} s",)
        changed = lines != self.lines
        self.lines = lines
        return changed

    def close(self) -> None:
        """End what is under way; a folder that does not answer is waited for no longer than a moment."""
        self._closed.set()
        if (child := self._child) is not None:
            child.kill()
        if self._thread is not None:
            self._thread.join(MOMENT_S)

    def _judge_anew(self) -> None:
        """Have the files judged if they have changed."""
        began_s, self._waited_s = self._clock(), 0.0
        files = self._list()
        if files and files != self._judged:
            self._judged = files
            with contextlib.suppress(OSError, *UNDECODABLE):
                self._child = child = begin_judging(self._folder, self._since_unix)
                steps = itertools.count(1)
                while child.poll() is None and not self._closed.wait(STEP_S):
                    if next(steps) % STEPS_PER_CHECK == 0:
                        self._list()
                child.kill()  # where it was closed; nothing happens to one that has ended
                said, _ = child.communicate()
                self._found = msgspec.json.decode(said, type=tuple[str, ...])
        now = self._clock()
        self._next_s = now + max(LEAST_SECONDS, (now - began_s - self._waited_s) / SHARE)

    def _list(self) -> Files:
        self._asked_s = asked_s = self._clock()
        files = self._list_files(self._folder, self._since_unix)
        self._waited_s += max(self._clock() - asked_s - SLOW_S, 0.0)
        self._asked_s = None
        return files

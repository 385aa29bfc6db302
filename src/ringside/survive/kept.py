"""Memory of a keeper that its worker writes: how far the worker has come, and the final state once there is one.

It is anonymous memory (a memfd) that every worker of the rank inherits, so it outlives them, and goes with the keeper.
A keeper imports neither torch nor NumPy, so neither does this; what makes a state of the bytes is in `final.py`.
"""

from __future__ import annotations

import os
import shutil
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

KEPT = "RINGSIDE_SURVIVE_KEPT"
"""Tells a worker which descriptor that is."""
START = "RINGSIDE_SURVIVE_START"
"""Tells a worker how often it was started."""
STATE_AT = 4096
"""Where the state begins; before it lies the head."""
_HEAD = struct.Struct("<8sQQQQQH")
_MAGIC = b"rs-final"
_NAME = "ringside-survive-kept"
_MOST_DIRECTORY = STATE_AT - _HEAD.size


class Stage(IntEnum):
    """How far the end of a job is for one rank."""

    TRAINING = 0
    KEPT = 1  # the final state lies here; others may not have theirs yet
    OVER = 2  # the job is over, and this is what all agreed on
    UNATTENDED = 3  # over, and rank 0 will not come: nobody runs its last lines


@dataclass(frozen=True)
class Head:
    """What stands beside the state.

    Args:
        progress: Steps that are committed and applied, the most that a worker of this rank has seen.
        stage: How far the end is.
        step: The next step that the state would begin.
        digest: Its digest.
        size_bytes: Its size.
        directory: Where a file of it is to go; "": to the directory for temporary files.
    """

    progress: int = 0
    stage: Stage = Stage.TRAINING
    step: int = 0
    digest: int = 0
    size_bytes: int = 0
    directory: str = ""


class Kept:
    """The memory, by its descriptor.

    Args:
        fd: The descriptor; None: memory of its own, for a keeper.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC) if fd is None else fd
        if fd is None:
            os.truncate(self.fd, STATE_AT)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str]) -> Kept | None:
        """Return what this worker's keeper gave it; None: it has none. Processes that the worker starts have none."""
        fd = environ.get(KEPT, "")
        try:
            if not os.readlink(f"/proc/self/fd/{int(fd)}").startswith(f"/memfd:{_NAME}"):
                return None
        except (OSError, ValueError):
            return None
        os.set_inheritable(int(fd), False)
        return cls(int(fd))

    @property
    def head(self) -> Head:
        """What stands there now."""
        data = os.pread(self.fd, STATE_AT, 0)
        if len(data) < STATE_AT:
            return Head()
        magic, progress, stage, step, digest, size_bytes, length = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            return Head()
        directory = os.fsdecode(data[_HEAD.size : _HEAD.size + length])
        return Head(progress, Stage(stage), step, digest, size_bytes, directory)

    @head.setter
    def head(self, head: Head) -> None:
        name = os.fsencode(head.directory)
        name = name if len(name) <= _MOST_DIRECTORY else b""
        numbers = (head.progress, head.stage, head.step, head.digest, head.size_bytes, len(name))
        os.pwrite(self.fd, _HEAD.pack(_MAGIC, *numbers) + name, 0)

    def progressed(self, steps: int) -> None:
        """Note that so many steps are in the state of this rank's worker."""
        head = self.head
        if steps > head.progress:
            self.head = replace(head, progress=steps)

    def save(self) -> str:
        """Write the final state into a new file that only this user can read; return its path.

        Raises:
            OSError: There is no room for it.
        """
        head = self.head
        name = f"ringside-final-step-{head.step:08d}-"
        fd, path = tempfile.mkstemp(".ringside", name, head.directory or None)
        try:
            with os.fdopen(fd, "wb") as file, open(os.dup(self.fd), "rb") as memory:
                memory.seek(STATE_AT)
                shutil.copyfileobj(memory, file, 1 << 20)
                file.write(head.digest.to_bytes(8, "little"))
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            os.unlink(path)
            raise
        return path

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)


__all__ = ["KEPT", "START", "STATE_AT", "Head", "Kept", "Stage"]

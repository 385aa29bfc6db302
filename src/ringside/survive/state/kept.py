"""Memory of a keeper that its worker writes: how far the worker has come, and the final state once there is one.

It is anonymous memory (a memfd) that every worker of the rank inherits, so it outlives them, and goes with the keeper.
A keeper imports neither torch nor NumPy, so neither does this; what makes a state of the bytes is in `final.py`.

A script that trains more than once has a part of it for each time, one behind the other: a worker that is started again
begins with the first, and must find there what was trained then.
"""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

KEPT = "RINGSIDE_SURVIVE_KEPT"
"""Tells a worker which descriptor that is."""
START = "RINGSIDE_SURVIVE_START"
"""Tells a worker how often it was started."""
STATE_AT = 4096
"""Where the state begins in a part; before it lies the head."""
DIGEST_BYTES = 8
"""Bytes of a digest behind the state in a file."""
_HEAD = struct.Struct("<8sQQQQQHH")
_MAGIC = b"rs-final"
_NAME = "ringside-survive-kept"
_MOST_DIRECTORY = STATE_AT - _HEAD.size
_PIECE_BYTES = 1 << 20


class Stage(IntEnum):
    """How far the end of a job is for one rank."""

    TRAINING = 0
    KEPT = 1  # the final state lies here; others may not have theirs yet
    OVER = 2  # the job is over, and this is what all agreed on
    UNATTENDED = 3  # over, and rank 0 will not come: nobody runs its last lines


class Lies(IntEnum):
    """Where the state is."""

    HERE = 0  # behind the head
    IN_FILE = 1  # in a file, for want of memory; it goes with the keeper
    SAVED = 2  # in a file that somebody was told of, which stays


@dataclass(frozen=True)
class Head:
    """What stands beside the state.

    Args:
        progress: Steps that are committed and applied, the most that a worker of this rank has seen.
        stage: How far the end is.
        step: The next step that the state would begin.
        digest: Its digest.
        size_bytes: Its size, also while it is being put here.
        directory: Where a file of it is to go; "": to the directory for temporary files. The file, where it is in one.
        lies: Where it is.
    """

    progress: int = 0
    stage: Stage = Stage.TRAINING
    step: int = 0
    digest: int = 0
    size_bytes: int = 0
    directory: str = ""
    lies: Lies = Lies.HERE


class Kept:
    """A part of the memory, by its descriptor.

    Args:
        fd: The descriptor; None: memory of its own, for a keeper.
        at: Where the part begins, bytes, at the beginning of a page.
    """

    def __init__(self, fd: int | None = None, offset: int = 0) -> None:
        self.fd = os.memfd_create(_NAME, os.MFD_CLOEXEC) if fd is None else fd
        self.offset = offset
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
    def number(self) -> int:
        """A number that no other memory has."""
        return os.fstat(self.fd).st_ino

    def behind(self) -> Kept:
        """Return the part for what is trained after this; it begins where this ends, which is over."""
        head = self.head
        size = head.size_bytes if head.lies is Lies.HERE else 0
        return Kept(self.fd, self.offset + STATE_AT + -(-size // STATE_AT) * STATE_AT)

    @property
    def newest(self) -> Kept:
        """The part of what is trained now: the last that a worker has begun to write."""
        *_, last = self._parts()
        return last

    def _parts(self) -> Iterator[Kept]:
        """Yield this part, and those behind it that a worker has begun to write."""
        part = self
        yield part
        while part.head.stage >= Stage.OVER:
            part = part.behind()
            if os.pread(self.fd, len(_MAGIC), part.offset) != _MAGIC:
                return
            yield part

    @property
    def head(self) -> Head:
        """What stands there now."""
        data = os.pread(self.fd, STATE_AT, self.offset)
        if not data.startswith(_MAGIC):
            return Head()
        _, progress, stage, step, digest, size_bytes, lies, length = _HEAD.unpack_from(data)
        directory = os.fsdecode(data[_HEAD.size : _HEAD.size + length])
        return Head(progress, Stage(stage), step, digest, size_bytes, directory, Lies(lies))

    @head.setter
    def head(self, head: Head) -> None:
        name = os.fsencode(head.directory)
        name = name if len(name) <= _MOST_DIRECTORY else b""
        numbers = (head.progress, head.stage, head.step, head.digest, head.size_bytes, head.lies, len(name))
        os.pwrite(self.fd, _HEAD.pack(_MAGIC, *numbers) + name, self.offset)

    def progressed(self, steps: int) -> None:
        """Note that so many steps are in the state of this rank's worker."""
        head = self.head
        if steps > head.progress:
            self.head = replace(head, progress=steps)

    def save(self) -> str:
        """Write the final state into a new file that only this user can read; return its path.

        Where it lies in a file already, that one stays from now on.

        Raises:
            OSError: There is no room for it.
        """
        head = self.head
        if head.lies is not Lies.HERE:
            self.head = replace(head, lies=Lies.SAVED)
            return head.directory
        with new_file(head.step, head.directory) as (file, path):
            offset, end = self.offset + STATE_AT, self.offset + STATE_AT + head.size_bytes
            while offset < end:
                piece = os.pread(self.fd, min(_PIECE_BYTES, end - offset), offset)
                os.write(file, piece)
                offset += len(piece)
            os.write(file, head.digest.to_bytes(DIGEST_BYTES, "little"))
            os.fsync(file)
        return path

    def close(self) -> None:
        """Let go of it, and of what lies in files only because there was no memory for it."""
        for part in self._parts():
            if part.head.lies is Lies.IN_FILE:
                with contextlib.suppress(OSError):
                    os.unlink(part.head.directory)
        os.close(self.fd)


@contextlib.contextmanager
def new_file(step: int, directory: str) -> Iterator[tuple[int, str]]:
    """Open a file for the final state that only this user can read: its descriptor and path; none is left by an error.

    Args:
        step: The next step that the state would begin.
        directory: Where it goes; "": to the directory for temporary files.
    """
    fd, path = tempfile.mkstemp(".ringside", f"ringside-final-step-{step:08d}-", directory or None)
    try:
        yield fd, path
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(fd)

"""The final state of a job: kept by a worker in its keeper's memory, taken from there, and read from a file."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ringside.engine.transports.base import Bytes
from ringside.errors import FinalStateError, RingsideError
from ringside.survive.state.kept import DIGEST_BYTES, STATE_AT, Head, Kept, Lies, Stage, new_file
from ringside.survive.state.state import JobState, pack, packed_size, unpack_checked

_log = logging.getLogger(__name__)


class Final:
    """The final state where it outlives this process.

    Args:
        kept: Memory of the keeper; None: there is none, and the state lives as long as this process.
        directory: Where a file of it goes if nobody can use it any more; None: to that for temporary files.
    """

    def __init__(self, kept: Kept | None, directory: str | Path | None = None) -> None:
        self._kept, self._directory = kept, "" if directory is None else str(Path(directory).absolute())

    @property
    def stage(self) -> Stage:
        """How far the end is for this rank."""
        return Stage.TRAINING if self._kept is None else self._kept.head.stage

    @property
    def is_over(self) -> bool:
        """Whether what is kept is what all ranks have agreed on."""
        return self.stage >= Stage.OVER

    def progressed(self, steps: int) -> None:
        """Tell the keeper how many steps are in this worker's state."""
        if self._kept is not None:
            self._kept.progressed(steps)

    def keep(self, state: JobState) -> int:
        """Keep a state; return its digest.

        It is kept in memory. Where that cannot be had, or a worker that tried it was killed over it, in a file.

        Raises:
            FinalStateError: It can be kept in neither, so nobody may be told that it was.
        """
        digest, tree, kept = state.digest(), state.tree(), self._kept
        if kept is None or (kept.head.stage is not Stage.TRAINING and kept.head.digest == digest):
            return digest
        before, size = kept.head, packed_size(tree)
        tried = before.stage is Stage.TRAINING and before.size_bytes > 0
        head = Head(before.progress, Stage.TRAINING, state.step, digest, size, self._directory)
        kept.head = head
        try:
            if tried:
                raise OSError("a process was killed over it")
            os.truncate(kept.fd, kept.offset + STATE_AT + size)
            os.posix_fallocate(kept.fd, kept.offset + STATE_AT, size)  # an error, and not a signal when it is written
            pack(tree, _mapped(kept.fd, kept.offset, STATE_AT + size, mmap.PROT_READ | mmap.PROT_WRITE)[STATE_AT:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(kept.fd, kept.offset + STATE_AT)  # half a state takes memory, too
            head = replace(head, directory=_written(tree, head, error), lies=Lies.IN_FILE)
        kept.head = replace(head, stage=Stage.KEPT)
        return digest

    def tree(self, digest: int | None = None) -> dict[str, Any] | None:
        """Return the state that is kept; None: there is none, or not the one of a digest."""
        kept = self._kept
        if kept is None or kept.head.stage is Stage.TRAINING or digest not in (None, kept.head.digest):
            return None
        head = kept.head
        try:
            if head.lies is not Lies.HERE:
                return final_state(head.directory)
            memory = _mapped(kept.fd, kept.offset, STATE_AT + head.size_bytes, mmap.PROT_READ)
            return unpack_checked(memory[STATE_AT:], head.digest)
        except (RingsideError, ValueError, OSError) as error:
            _log.warning("the state that was kept cannot be used: %s", error)
            return None

    def agree(self, attended: bool) -> None:
        """Note that what is kept is the final state of the job, and whether rank 0 has it."""
        if self._kept is not None and self._kept.head.stage is not Stage.TRAINING:
            self._kept.head = replace(self._kept.head, stage=Stage.OVER if attended else Stage.UNATTENDED)

    def save(self) -> str:
        """Write what is kept into a file; return its path, "": nothing is kept, or it cannot be written."""
        if self.stage is Stage.TRAINING or self._kept is None:
            return ""
        try:
            return self._kept.save()
        except OSError as error:
            _log.warning("the final state cannot be written to a file: %s", error)
            return ""


def final_state(path: str | Path) -> dict[str, Any]:
    """Return the state in a file `ringside-final-step-….ringside`: `model`, `optimizer`, `step` and what else moves.

    Such a file is written where a job was trained to its end and the script's last lines could not be run with that;
    the error says where it lies. It holds tensors and plain values, and nothing in it is ever run.

    Raises:
        RingsideError: It is no such file, or not whole.
    """
    try:
        memory = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise RingsideError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return unpack_checked(memory[:-DIGEST_BYTES], int.from_bytes(memory[-DIGEST_BYTES:].tobytes(), "little"))
    except RingsideError:
        raise RingsideError(f"{path} is no file of a final state, or not whole") from None


def _written(tree: dict[str, Any], head: Head, no_memory: OSError) -> str:
    """Write a state into a file in place of memory; return its path."""
    try:
        with new_file(head.step, head.directory) as (fd, path):
            whole = head.size_bytes + DIGEST_BYTES
            os.posix_fallocate(fd, 0, whole)
            memory = _mapped(fd, 0, whole, mmap.PROT_READ | mmap.PROT_WRITE)
            pack(tree, memory[:-DIGEST_BYTES])
            memory[-DIGEST_BYTES:] = np.frombuffer(head.digest.to_bytes(DIGEST_BYTES, "little"), dtype=np.uint8)
    except OSError as error:
        raise FinalStateError(
            f"the final state can be kept neither in memory ({no_memory}) nor in a file ({error}): the job is not over "
            "before it is; make room and start it again"
        ) from None
    _log.warning("there is no memory to keep the final state in (%s): it is kept in %s", no_memory, path)
    return path


def _mapped(fd: int, offset: int, size: int, access: int) -> Bytes:
    return np.frombuffer(mmap.mmap(fd, size, prot=access, offset=offset), dtype=np.uint8)

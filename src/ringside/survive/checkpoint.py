"""Checkpoints in the format of torch.distributed.checkpoint: of committed steps only, written whole or not at all.

A checkpoint is a directory `step-00000120`. It is written beside, under a name that nobody reads, and renamed when it
is on the disk. Its tensors have the names that DCP gives a nested state (`model.0.weight`), so that
`dcp.load({"model": model.state_dict()}, checkpoint_id=...)` reads it without Ringside; `ringside.skeleton` holds the
rest. A digest over all of it is checked before anything is loaded.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ringside.errors import RingsideError
from ringside.survive.trees import digest_of, put_together, take_apart

KEPT = 2
"""Checkpoints that are kept: the newest, and one more in case it is torn."""
_SKELETON = "ringside.skeleton"
_ABOUT = "ringside.json"
_NAME = re.compile(r"step-(\d{8,})")

_log = logging.getLogger("ringside")


class About(msgspec.Struct, frozen=True):
    """What stands beside a checkpoint.

    Args:
        step: The next step to be trained.
        digest: Digest of the state.
    """

    step: int
    digest: int


class Checkpoints:
    """The checkpoints of a job.

    Args:
        directory: Where they are; all ranks must see the same.
        kept: How many are kept.
    """

    def __init__(self, directory: Path, kept: int = KEPT) -> None:
        self.directory = directory
        self._kept = kept
        self._writer: threading.Thread | None = None
        self._failing = False

    def begin(self, tree: dict[str, Any]) -> bool:
        """Begin to write a state on a thread; return False, and do nothing, while another is being written.

        Args:
            tree: The state, with tensors that nobody changes any more.
        """
        if self._writer is not None and self._writer.is_alive():
            return False
        self._writer = threading.Thread(target=self._try_writing, args=(tree,), name="ringside-checkpoint", daemon=True)
        self._writer.start()
        return True

    def finish(self, timeout_s: float) -> bool:
        """Wait for the one that is being written; return whether none is any more."""
        if self._writer is not None:
            self._writer.join(timeout_s)
            return not self._writer.is_alive()
        return True

    def newest(self) -> dict[str, Any] | None:
        """Return the newest state that is whole; None: there is none."""
        for _, path in self._found():
            try:
                return read(path)
            except RingsideError as error:
                _log.warning("%s is skipped for the one before it: %s", path, error)
        return None

    def _try_writing(self, tree: dict[str, Any]) -> None:
        try:
            self.write(tree)
            self._failing = False
        except Exception as error:  # what goes wrong in DCP comes in several types
            self._tell(f"no checkpoint of step {tree['step']} ({_first_line(error)})")

    def _tell(self, what: str) -> None:
        """Warn once until a checkpoint can be written again; training goes on meanwhile."""
        level = logging.INFO if self._failing else logging.WARNING
        _log.log(level, "%s: training goes on, the one before stays; make room in %s", what, self.directory)
        self._failing = True

    def write(self, tree: dict[str, Any]) -> Path:
        """Write a state and return where it is now; errors are those of the disk, and leave nothing behind."""
        path = self.directory / f"step-{tree['step']:08d}"
        if path.exists():
            return path
        beside = self.directory / f".{path.name}-{os.getpid()}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _save(tree, beside)
            beside.rename(path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            if path.exists():
                return path  # another rank was faster
            raise
        _sync(self.directory)
        self._forget_old()
        return path

    def _found(self) -> Iterator[tuple[int, Path]]:
        """Yield (step, path), newest first."""
        if self.directory.is_dir():
            named = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
            yield from sorted(((int(match[1]), path) for match, path in named if match), reverse=True)

    def _forget_old(self) -> None:
        for _, path in list(self._found())[self._kept :]:
            shutil.rmtree(path, ignore_errors=True)


def read(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint.

    Raises:
        RingsideError: It is torn, or another state than was written.
    """
    try:
        about = msgspec.json.decode((path / _ABOUT).read_bytes(), type=About)
        tensors = _load(path)
        tree: dict[str, Any] = put_together(msgspec.msgpack.decode(tensors[_SKELETON].numpy().tobytes()), tensors)
        digest = digest_of(tree)
    except Exception as error:  # unpickling torn metadata raises whatever it likes
        raise RingsideError(f"it is torn ({_first_line(error)})") from error
    if digest != about.digest:
        raise RingsideError("its content is not what was written")
    return tree


def _save(tree: dict[str, Any], path: Path) -> None:
    skeleton, tensors = take_apart(tree)
    packed = torch.frombuffer(bytearray(msgspec.msgpack.encode(skeleton)), dtype=torch.uint8)
    _write(path, {**tensors, _SKELETON: packed})
    (path / _ABOUT).write_bytes(msgspec.json.encode(About(tree["step"], digest_of(tree))))
    for name in (path / _ABOUT, path):
        _sync(name)


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Do what `dcp.save` does on the only rank of a job, which it cannot do without a warning."""
    writer, planner = FileSystemWriter(path, sync_files=True), DefaultSavePlanner()
    planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])


def _load(path: Path) -> dict[str, torch.Tensor]:
    reader, planner = FileSystemReader(path), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    wanted = {
        name: torch.empty(about.size, dtype=about.properties.dtype)
        for name, about in metadata.state_dict_metadata.items()
        if isinstance(about, TensorStorageMetadata)
    }
    planner.set_up_planner(wanted, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return wanted


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

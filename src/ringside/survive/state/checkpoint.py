"""Checkpoints in the format of torch.distributed.checkpoint: of committed steps only, written whole or not at all.

A checkpoint is a directory `step-00000120`. It is written beside, under a name that nobody reads, and renamed when it
is on the disk. Its tensors have the names that DCP gives a nested state (`model.0.weight`), so that
`dcp.load({"model": model.state_dict()}, checkpoint_id=...)` reads it without Ringside; `ringside.skeleton` holds the
rest. `ringside.json` holds a digest of every file, compared before any of it is read, and one of the whole state.
Whoever can write the directory can write digests, too: so the files are read without running anything that lies in them
(`torch_checkpoint.py`).

One that is torn is passed over, and set aside (`torn-step-00000120`) when the same step is written again. What a writer
that was killed left beside is removed by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from ringside.errors import RingsideError
from ringside.processes import is_running
from ringside.survive.cluster.peers import own_place
from ringside.survive.state import torch_checkpoint as dcp_files
from ringside.survive.state.state import digest_of, put_together, take_apart

KEPT = 2
"""Checkpoints that are kept: the newest, and one more in case it is torn."""
_SKELETON = "ringside.skeleton"
_ABOUT = "ringside.json"
_NAME = re.compile(r"step-(\d{8,})")
_BESIDE = re.compile(r"\.step-\d{8,}-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-(?P<started>\d+)-[0-9a-f]{8}")
"""Where a writer writes: its machine, process and start."""
_TORN, _GONE = "torn-", ".gone-"
_FORGOTTEN_S = 3600.0
"""A writer that nobody here can look at is taken for dead when it has written nothing for so long, seconds."""
_MOST_ABOUT_BYTES, _PIECE_BYTES = 1 << 20, 1 << 22

_log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True):
    """What stands beside a checkpoint.

    Args:
        step: The next step to be trained.
        digest: Digest of the state.
        files: Digest of every other file, by name.
    """

    step: int
    digest: int
    files: dict[str, str]


class Checkpoints:
    """The checkpoints of a job.

    Args:
        directory: Where they are; all ranks must see the same.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._writer: threading.Thread | None = None
        self._failing = False
        self._torn: set[Path] = set()

    def begin(self, tree: dict[str, Any]) -> None:
        """Begin to write a state on a thread; do nothing while another is being written.

        Args:
            tree: The state, with tensors that nobody changes any more.
        """
        if self._writer is not None and self._writer.is_alive():
            return
        self._writer = threading.Thread(target=self._try_write, args=(tree,), name="ringside-checkpoint", daemon=True)
        self._writer.start()

    def _try_write(self, tree: dict[str, Any]) -> None:
        try:
            self.write(tree)
            self._failing = False
        except Exception as error:  # what goes wrong in DCP comes in several types
            # Warn once until a checkpoint can be written again; training goes on meanwhile.
            level = logging.INFO if self._failing else logging.WARNING
            problem = f"no checkpoint of step {tree['step']} ({_first_line(error)})"
            _log.log(level, "%s: training goes on, the one before stays; make room in %s", problem, self.directory)
            self._failing = True

    def finish(self, timeout_s: float) -> None:
        """Wait for the one that is being written."""
        if self._writer is not None:
            self._writer.join(timeout_s)

    def newest(self) -> dict[str, Any] | None:
        """Return the newest state that is whole; None: there is none."""
        for _, path in self._found():
            try:
                return read(path)
            except RingsideError as error:
                self._torn.add(path)
                _log.warning("%s is skipped for the one before it: %s", path, error)
        return None

    def write(self, tree: dict[str, Any]) -> Path:
        """Write a state and return where it is now; errors are those of the disk, and leave nothing behind."""
        path = self.directory / f"step-{tree['step']:08d}"
        if _holds(path, tree):
            return path
        self.directory.mkdir(parents=True, exist_ok=True)
        # The name tells this writer from all others, on whatever host: who is dead can be seen by it.
        place = own_place()
        writer = f"{_short(place.machine)}-{place.pid}-{place.started}"
        beside = self.directory / f".{path.name}-{writer}-{secrets.token_hex(4)}"
        beside.mkdir()
        try:
            self._remove_leftovers(now=beside.stat().st_mtime)
            _save(tree, beside)
            self._put_in_place(beside, path, tree)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        _sync(self.directory)
        self._torn.discard(path)
        # All before the newest that are kept go; one that is torn does not count.
        kept = [step for step, path in self._found() if path not in self._torn][:KEPT]
        for old in self.directory.iterdir():
            match = _NAME.fullmatch(old.name.removeprefix(_TORN))
            if match is not None and kept and int(match[1]) < kept[-1]:
                self._remove(old)
        return path

    def _put_in_place(self, beside: Path, path: Path, tree: dict[str, Any]) -> None:
        """Rename a directory to its final name; what stands there is set aside, unless it is this very state."""
        for last_try in (False, False, True):
            try:
                beside.rename(path)
                return
            except OSError:
                if last_try or not path.exists():
                    raise
            if _holds(path, tree):  # another rank was faster
                return
            aside = self.directory / f"{_TORN}{path.name}"
            self._remove(aside)
            with contextlib.suppress(OSError):  # another rank was faster here, too; if not, the next attempt says why
                path.rename(aside)
                _log.warning("%s was torn, or another state: it is written anew, and lies in %s now", path, aside.name)

    def _remove_leftovers(self, now: float) -> None:
        """Remove what writers left that are dead.

        Args:
            now: The time as this file system tells it.
        """
        for path in self.directory.glob(".*"):
            match = _BESIDE.fullmatch(path.name)
            if path.name.startswith(_GONE) or (match is not None and _is_abandoned(path, match, now)):
                self._remove(path)

    def _remove(self, path: Path) -> None:
        """Remove a directory; renamed first, so that a writer that lives after all cannot put half of it in place."""
        gone = self.directory / f"{_GONE}{secrets.token_hex(8)}"
        with contextlib.suppress(OSError):  # another rank was faster
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _found(self) -> Iterator[tuple[int, Path]]:
        """Yield (step, path), newest first."""
        if self.directory.is_dir():
            named = [(_NAME.fullmatch(path.name), path) for path in self.directory.iterdir()]
            yield from sorted(((int(match[1]), path) for match, path in named if match), reverse=True)


def read(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint.

    Raises:
        RingsideError: It is torn, or another state than was written.
    """
    try:
        with dcp_files.open_file(path / _ABOUT) as file:
            about = msgspec.json.decode(file.read(_MOST_ABOUT_BYTES), type=Manifest)
        # Digests first: nothing of a file is decoded that is not what was written.
        for name, digest in about.files.items():
            if _file_digest(path / Path(name).name) != digest:
                raise RingsideError(f"{name} is not what was written")
        tensors = dcp_files.read(path)
        tree: dict[str, Any] = put_together(msgspec.msgpack.decode(tensors[_SKELETON].numpy().tobytes()), tensors)
        whole = digest_of(tree) == about.digest and tree["step"] == about.step
    except Exception as error:  # torn files have whatever is read of them raise what it likes
        raise RingsideError(f"it is torn ({_first_line(error)})") from error
    if not whole:
        raise RingsideError("its content is not what was written")
    return tree


def _holds(path: Path, tree: dict[str, Any]) -> bool:
    """Tell whether a directory is a whole checkpoint of this very state."""
    try:
        return path.exists() and digest_of(read(path)) == digest_of(tree)
    except RingsideError:
        return False


def _save(tree: dict[str, Any], path: Path) -> None:
    skeleton, tensors = take_apart(tree)
    packed = torch.frombuffer(bytearray(msgspec.msgpack.encode(skeleton)), dtype=torch.uint8)
    dcp_files.write(path, {**tensors, _SKELETON: packed})
    files = {file.name: _file_digest(file) for file in sorted(path.iterdir())}
    (path / _ABOUT).write_bytes(msgspec.json.encode(Manifest(tree["step"], digest_of(tree), files)))
    for name in (path / _ABOUT, path):
        _sync(name)


def _file_digest(path: Path) -> str:
    whole = hashlib.blake2b()
    with dcp_files.open_file(path) as file:
        while piece := file.read(_PIECE_BYTES):
            whole.update(piece)
    return whole.hexdigest()


def _is_abandoned(path: Path, writer: re.Match[str], now: float) -> bool:
    """Tell whether the writer of a directory is dead; one on another host when it has written nothing for long."""
    if writer["machine"] == _short(own_place().machine):
        return not is_running(int(writer["pid"]), int(writer["started"]))
    try:
        return now - max(each.lstat().st_mtime for each in (path, *path.iterdir())) > _FORGOTTEN_S
    except OSError:
        return False


def _short(machine: str) -> str:
    return hashlib.blake2b(machine.encode(), digest_size=4).hexdigest()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__

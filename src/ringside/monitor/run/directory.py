"""A run on disk: a directory of JSON and JSON lines that is readable at any moment, even after SIGKILL.

`run.json` (what is known at the start), `steps.jsonl` (one `StepRecord` per line), `events.jsonl` (what happened),
and, once requested, `summary.json` and `report.html`. Lines are only ever appended; whole files are
replaced in one rename. Nothing in a run directory is ever executed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError, UsageError
from ringside.files import append_to_file, replace_file
from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.undecided import Undecided

RUN, STEPS, EVENTS, SUMMARY, REPORT = "run.json", "steps.jsonl", "events.jsonl", "summary.json", "report.html"
UNDECIDED = "undecided.json"
BLOCK_BYTES = 1 << 20
FULL_BYTES = 1 << 30
"""About three million records."""
MOST_RANKS = 1 << 17
"""More are damage: readers make arrays for every rank."""

DEEPEST = 64

Event = dict[str, Any]
"""`{"unix": seconds since 1970, "kind": "started|verdict|repaired|revised|gradient_memory|rank_lost|...", ...}`."""

_log = logging.getLogger(__name__)


def _as_builtin(value: Any) -> Any:
    """Return NumPy's scalars as Python's; anything else unknown as text: recording must never raise."""
    try:
        return value.item() if hasattr(value, "item") else str(value)
    except Exception:  # an array of several elements, or anybody's class
        return f"<{type(value).__name__}>"


_encode = msgspec.json.Encoder(enc_hook=_as_builtin).encode
_decode_record = msgspec.json.Decoder(StepRecord).decode
_FLOATS = frozenset(name for name, kind in StepRecord.__annotations__.items() if kind == "float")
_floats_of = attrgetter(*_FLOATS)
MOST_S = 1e12
"""More seconds than this, of all fields of a record together, are damage: what they are part of would be infinite."""
_T = TypeVar("_T")


class RunWriter:
    """Appends to a run directory; a failing disk turns it off with one warning and never stops training.

    Args:
        path: The run directory; made where it is missing.
        info: What `run.json` is to hold.
        full_bytes: Size of `steps.jsonl` up to which every step is written; then every second, from one and a half
            times that size on every fourth, and so on: the file grows with the logarithm of the steps.

    Attributes:
        path: The run directory.
        off: Whether writing was given up.
        stride: Of how many steps one is written.
    """

    def __init__(self, path: str | os.PathLike[str], info: RunInfo, *, full_bytes: int = FULL_BYTES) -> None:
        self.path = Path(path)
        self.off = False
        self.stride = 1
        self._written_bytes, self._room_bytes, self._more_bytes = 0, full_bytes, max(full_bytes // 2, 1)
        self._try(lambda: self._create(info))

    def _create(self, info: RunInfo) -> None:
        if (self.path / RUN).exists():
            # An earlier run of the same name keeps its content, under the first free name of `path.1`, `path.2`, ...
            number = 1
            while os.path.lexists(aside := self.path.with_name(f"{self.path.name}.{number}")):
                number += 1
            self.path.rename(aside)
        self.path.mkdir(parents=True, exist_ok=True)
        replace_file(self.path / RUN, msgspec.json.format(_encode(info)) + b"\n")
        for name in (STEPS, EVENTS):
            append_to_file(self.path / name, b"")

    def append(self, records: Iterable[StepRecord]) -> None:
        """Append one batch of step records; they are in the file when this returns."""
        data = b"".join(_encode(record) + b"\n" for record in records if record.step % self.stride == 0)
        self._append(STEPS, data)
        self._written_bytes += len(data)
        while self._written_bytes >= self._room_bytes:
            self._room_bytes += self._more_bytes
            self.stride *= 2
            text = f"{STEPS} has {self._written_bytes} bytes: from here on one step of {self.stride} is written"
            self.event({"unix": time.time(), "kind": "note", "text": text, "stride": self.stride})

    def event(self, event: Event) -> None:
        """Append one event."""
        self._append(EVENTS, _encode(finite(event)) + b"\n")

    def put_undecided(self, undecided: Undecided) -> None:
        """Replace what is undecided now; where that cannot be written the run goes on without."""
        with contextlib.suppress(OSError, ValueError):
            if not self.off:
                replace_file(self.path / UNDECIDED, msgspec.json.encode(undecided) + b"\n")

    def _append(self, name: str, data: bytes) -> None:
        if data and not self.off:
            self._try(lambda: append_to_file(self.path / name, data))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
            self.off = True
            _log.warning(
                "The run directory %s cannot be written (%s): training goes on, but nothing more of this run is "
                "recorded on disk. Free some space or choose another --run-dir for the next run.",
                self.path,
                getattr(error, "strerror", None) or error,
            )


class RunReader:
    """Reads a run directory as far as it is whole, also while it grows.

    A torn last line is left for the next `poll`; damaged lines and unknown fields are skipped.

    Args:
        path: The run directory.

    Attributes:
        path: The run directory.
        info: The content of `run.json`.

    Raises:
        UsageError: `path` is no run directory.
        RingsideError: It is one and cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.info = _read_info(self.path)
        self._steps = _Lines(self.path / STEPS)
        self._events = _Lines(self.path / EVENTS)

    def poll(self) -> list[StepRecord]:
        """Return the step records that were added since the last call."""
        return list(self.iterate())

    def iterate(self) -> Iterator[StepRecord]:
        """Yield the step records that were added since they were last read, without holding them all."""
        for line in self._steps.new():
            record = decode_record(line)
            if record is not None:
                yield record

    def poll_events(self) -> list[Event]:
        """Return the events that were added since the last call."""
        events = (_or_none(partial(msgspec.json.decode, line)) for line in self._events.new())
        return [event for event in events if isinstance(event, dict) and isinstance(event.get("kind"), str)]

    def undecided(self) -> Undecided | None:
        """Return what was undecided when the run was last looked at; None where that is not known."""
        return _or_none(lambda: msgspec.json.decode(_content(self.path / UNDECIDED), type=Undecided))

    def summary(self) -> dict[str, Any] | None:
        """Return `summary.json`; None where there is none yet or it cannot be read."""
        content = _or_none(lambda: msgspec.json.decode(_content(self.path / SUMMARY)))
        return content if isinstance(content, dict) else None


def runs_under(directory: Path) -> list[Path]:
    """Return the run directories right below a directory, the one begun last first; empty where it cannot be read."""
    found = []
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                found.append(((path / RUN).stat().st_mtime_ns, path))
    return [path for _, path in sorted(found, reverse=True)]


def decode_record(line: bytes) -> StepRecord | None:
    """Return the record in one line of `steps.jsonl`; None where the line is damaged.

    JSON has no NaN: a null where a number belongs becomes NaN again.
    """
    unknown: tuple[str, ...] = ()
    try:
        record = _decode_record(line)
    except msgspec.ValidationError:
        # Again with 0 where a number is null: few records have any, so the fast way comes first.
        try:
            fields = msgspec.json.decode(line, type=dict[str, Any])
            unknown = tuple(key for key, value in fields.items() if value is None and key in _FLOATS)
            record = msgspec.convert({**fields, **dict.fromkeys(unknown, 0.0)}, StepRecord)
        except UNDECODABLE:
            return None
    except UNDECODABLE:
        return None
    if sum(map(abs, _floats_of(record))) > MOST_S:
        return None
    return msgspec.structs.replace(record, **dict.fromkeys(unknown, math.nan)) if unknown else record


def finite(value: Any, deepest: int = DEEPEST) -> Any:
    """Return a JSON-like value with NaN and infinities replaced by None and tuples by lists, at every depth.

    What lies deeper than `deepest` lists and dictionaries is replaced by None as well.
    """
    value = msgspec.to_builtins(value, builtin_types=(float,)) if isinstance(value, msgspec.Struct) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item, deepest - 1) for key, item in value.items()} if deepest else None
    if isinstance(value, list | tuple):
        return [finite(item, deepest - 1) for item in value] if deepest else None
    return value


class _Lines:
    """The whole lines of a growing file, each once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new(self) -> Iterator[bytes]:
        try:
            with open_regular(self._path) as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # another run has begun in this directory
                file.seek(self._offset)
                while block := file.read(BLOCK_BYTES):
                    if not block.endswith(b"\n"):
                        block += file.readline()
                    block = block[: block.rfind(b"\n") + 1]
                    if not block:
                        break  # a torn last line is read once it is whole
                    self._offset += len(block)
                    yield from (line for line in block.split(b"\n") if line.strip())
        except FileNotFoundError:
            return
        except OSError as error:
            raise RingsideError(f"{self._path} cannot be read: {error.strerror or error}") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file of a run to read its bytes; what is no regular file (a pipe, a device) would never end.

    Raises:
        OSError: It cannot be opened, or is no regular file.
    """
    # Not blocking: opening a pipe that nobody writes to would wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file")


def _read_info(path: Path) -> RunInfo:
    try:
        info = msgspec.json.decode(_content(path / RUN), type=RunInfo)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(
            f"{path} is no run: it has no {RUN}. Give the directory a run printed on its last line"
        ) from None
    except OSError as error:
        raise RingsideError(f"{path / RUN} cannot be read: {error.strerror or error}") from error
    except UNDECODABLE as error:
        raise UsageError(f"{path} is no run that this version can read: {RUN}: {error}") from None
    if info.schema > SCHEMA:
        raise UsageError(
            f"{path} was written by a newer Ringside (schema {info.schema}; this one knows {SCHEMA}): read it with "
            "that one, or update Ringside"
        )
    if not 0 < info.world_size <= MOST_RANKS:
        raise RingsideError(f"{path / RUN} gives {info.world_size} ranks: it is damaged")
    return info


def _content(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def _or_none(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except (OSError, *UNDECODABLE):
        return None

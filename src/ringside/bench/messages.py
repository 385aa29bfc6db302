"""What a rank reports to the parent, one JSON object per line in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import msgspec


class WorkerHello(msgspec.Struct, frozen=True, tag=True):
    """The rank runs, as process `pid`."""

    pid: int


class Skipped(msgspec.Struct, frozen=True, tag=True):
    """A peer cannot run this; `reason` is one line."""

    peer: str
    reason: str


class About(msgspec.Struct, frozen=True, tag=True):
    """What takes part as a peer: version, components, single-copy mechanism and settings, in one line."""

    peer: str
    text: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The rank starts on something; `what` names it for people, `share` is the part of the run done, 0 to 1."""

    what: str
    share: float


class Limit(msgspec.Struct, frozen=True, tag=True):
    """Streaming 2 × `size_bytes` in and 2 × `size_bytes` out took `seconds`, per round."""

    size_bytes: int
    seconds: tuple[float, ...]


class Sample(msgspec.Struct, frozen=True, tag=True):
    """One engine on one size.

    Args:
        engine: ringside or the peer.
        algorithm: Of ours; "auto" for what it chooses, and for peers.
        tensor: symmetric or private.
        cache: warm, cold or any.
        size_bytes: Of the tensor.
        buffers: Rotated through.
        iterations: Per round (of the last one, if turns had to be shortened).
        seconds: Mean per all-reduce on this rank, per round.
        wrong: Elements of the checked tensor that were wrong on this rank.
        array: What it was given: numpy or torch.
        median_s: Of single calls on this rank, seconds; each is timed by itself, after the rounds.
        late_s: Their 99th percentile.
    """

    engine: str
    algorithm: str
    tensor: str
    cache: str
    size_bytes: int
    buffers: int
    iterations: int
    seconds: tuple[float, ...]
    wrong: int
    array: str = "numpy"
    median_s: float = 0.0
    late_s: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The rank gave up; `lost` are the ranks it missed."""

    error: str
    message: str
    lost: tuple[int, ...] = ()


class Done(msgspec.Struct, frozen=True, tag=True):
    """The rank finished."""


Message = WorkerHello | Skipped | About | Begin | Limit | Sample | Failed | Done
_decoder = msgspec.json.Decoder(type=WorkerHello | Skipped | About | Begin | Limit | Sample | Failed | Done)


def report_path(directory: Path, rank: int) -> Path:
    """Return where a rank writes its messages."""
    return directory / f"rank-{rank}.jsonl"


class Writer:
    """Appends messages to a rank's file."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._file = report_path(directory, rank).open("ab", buffering=0)

    def send(self, message: Message) -> None:
        """Append one message, whole."""
        self._file.write(msgspec.json.encode(message) + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MessageReader:
    """Follows a rank's file while it grows."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._path = report_path(directory, rank)
        self._file: IO[bytes] | None = None
        self._rest = b""

    def read(self) -> list[Message]:
        """Return the messages that came since the last call."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open("rb")
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return [_decoder.decode(line) for line in lines]

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

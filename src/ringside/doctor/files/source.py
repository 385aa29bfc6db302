"""A file worth reading, wherever it lies, and what is too much of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ringside.doctor.files.streams import Report
from ringside.doctor.findings import Note
from ringside.text import size

HEAD_BYTES = 16 << 10


@dataclass(frozen=True)
class Limits:
    """What is too much.

    Args:
        folder_depth: Folders inside folders, on disk or in an archive's names.
        nesting: Archives inside archives.
        files: Files in all.
        file_bytes: Bytes that one compressed file may unpack to.
        ratio: Bytes unpacked per byte read, beyond which it is a bomb ...
        ratio_after_bytes: ... once so many are unpacked (deflate reaches 1030; a trace 10 to 100).
    """

    folder_depth: int = 32
    nesting: int = 3
    files: int = 100_000
    file_bytes: int = 16 << 30
    ratio: int = 400
    ratio_after_bytes: int = 64 << 20


Opener = Callable[[Report], BinaryIO]


@dataclass(eq=False)
class Source:
    """One file to be read: on disk or inside archives, compressed or not.

    Args:
        name: What to call it: its path as it was given; `archive.tar.gz!member` inside an archive.
        path: The file on disk that it is, or lies in.
        head: Its first `HEAD_BYTES`, unpacked, to recognise it by.
        size_bytes: Bytes on disk (in its archive), where known.
        ratio: How far its head was packed (1 where it is not compressed).
        problems: Plain lines about what could not be read of it; reading adds to them.
    """

    name: str
    path: Path
    head: bytes
    opener: Opener = field(repr=False)
    size_bytes: int = 0
    ratio: float = 1.0
    problems: list[str] = field(default_factory=list)

    def open(self) -> BinaryIO:
        """Return a stream over the whole content, unpacked; to be closed. It never raises while it is read:

        where it cannot go on it ends, and `problems` has the reason.
        """
        return self.opener(self.note_problem)

    def read(self, most_bytes: int) -> bytes:
        """Return the content; the part beyond `most_bytes` is left out, with a line in `problems`."""
        with self.open() as stream:
            content = stream.read(most_bytes + 1)
        if len(content) > most_bytes:
            self.note_problem(f"is larger than {size(most_bytes, binary=True)}; only that much of it was read")
        return content[:most_bytes]

    def note_problem(self, line: str) -> None:
        """Note a problem, once."""
        if line not in self.problems:
            self.problems.append(line)


@dataclass
class Gathered:
    """Sources found, and notes on what was left out."""

    sources: list[Source] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

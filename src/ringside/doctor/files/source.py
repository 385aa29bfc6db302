"""What a reader is given: files worth reading, wherever they lie, whose bytes are not trusted, and whom it tells."""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from ringside.text import size

# -------------------------------------------------------------------------------------------------
# Bytes of untrusted files: a part of a file, and gzip that neither bursts nor raises.
#
# A stream that cannot go on *ends*, and reports why once: what came before can still be used.

BLOCK_BYTES = 1 << 16
BUFFER_BYTES = 1 << 18
GZIP = b"\x1f\x8b"
GZIP_BITS = 16 + zlib.MAX_WBITS
"""Tells zlib that gzip's header and checksum stand around the data."""

Report = Callable[[str], None]
"""Receives one plain line about the file, such as what of it is lost."""
Stream = IO[bytes] | io.RawIOBase
"""What streams are made of."""


def buffered(raw: io.RawIOBase) -> BinaryIO:
    """Return a buffered stream over a raw one; closed together."""
    return io.BufferedReader(raw, BUFFER_BYTES)


class _Stream(io.RawIOBase):
    """A raw stream that is made by its next bytes."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill the buffer; 0 at the end."""
        data = self._next(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _next(self, most_bytes: int) -> bytes:
        """Return the next bytes; none at the end."""
        raise NotImplementedError


class Slice(_Stream):
    """A part of an open file; many may be read at once, each from its own place.

    Args:
        fd: The file's descriptor, kept open by its owner.
        offset: First byte of the part.
        length: Its bytes.
    """

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self._fd, self._offset, self._length, self._position = fd, offset, length, 0

    def _next(self, most_bytes: int) -> bytes:
        # pread: other slices of the same file keep their own positions
        data = os.pread(self._fd, min(most_bytes, self._length - self._position), self._offset + self._position)
        self._position += len(data)
        return data


class Careful(_Stream):
    """Reads on until an error, then ends and reports it; counts what was read.

    Args:
        raw: Where the bytes come from; closed with this.
        report: Called with a line on an error.
        count: Called with the number of bytes read.
    """

    def __init__(self, raw: Stream, report: Report, count: Callable[[int], None]) -> None:
        self._raw, self._report, self._count = raw, report, count

    def _next(self, most_bytes: int) -> bytes:
        try:
            data = self._raw.read(most_bytes) or b""
        except Exception as error:  # of a hostile archive the unpackers raise anything at all
            self._report(f"cannot be read further: {getattr(error, 'strerror', None) or error}")
            return b""
        self._count(len(data))
        return data

    def close(self) -> None:
        """Close what lies beneath as well."""
        self._raw.close()
        super().close()


class Gunzip(_Stream):
    """The content of a gzip file, of several members as well; a broken or bursting one ends with a line.

    Args:
        raw: The compressed bytes; closed with this.
        report: Called where it breaks off, is damaged, or is refused.
        limits: What is too much to unpack.
    """

    def __init__(self, raw: Stream, report: Report, limits: Limits) -> None:
        self._raw, self._report, self._limits = raw, report, limits
        self._zip = zlib.decompressobj(wbits=GZIP_BITS)
        self._waiting = b""
        self._read = self._made = 0
        self._over = False

    @property
    def ratio(self) -> float:
        """Bytes unpacked per byte taken so far."""
        return self._made / max(self._read - len(self._waiting), 1)

    def _next(self, most_bytes: int) -> bytes:
        data = b""
        while not data and not self._over:
            data = self._read_block(most_bytes)
        return data

    def close(self) -> None:
        """Close what lies beneath as well."""
        self._raw.close()
        super().close()

    def _read_block(self, most_bytes: int) -> bytes:
        """The next unpacked bytes, at most `most_bytes`; may be none before the end."""
        if self._zip.eof:
            # The next member; what does not look like one is padding.
            self._waiting = (self._waiting or self._raw.read(BLOCK_BYTES) or b"").lstrip(b"\0")
            if self._waiting[:2] != GZIP:
                self._over = True
                return b""
            self._read += len(self._waiting)
            self._zip = zlib.decompressobj(wbits=GZIP_BITS)
        if not self._waiting:
            self._waiting = self._raw.read(BLOCK_BYTES) or b""
            self._read += len(self._waiting)
            if not self._waiting:
                return self._end(f"the gzip breaks off: {size(self._made)} are whole, whatever came after is lost")
        try:
            data = self._zip.decompress(self._waiting, most_bytes)
        except zlib.error:
            return self._end(f"the gzip is damaged after {size(self._made)}: whatever comes after is lost")
        self._waiting = self._zip.unused_data if self._zip.eof else self._zip.unconsumed_tail
        self._made += len(data)
        # A bomb: too much in all, or far more than was read (small files may be packed as tightly as they like).
        if self._made > self._limits.file_bytes:
            return self._end(f"refused: it unpacks to more than {size(self._limits.file_bytes)}")
        if self._made > self._limits.ratio_after_bytes and self.ratio > self._limits.ratio:
            made = size(self._made)
            return self._end(f"refused as a compression bomb: {size(self._read)} unpack to more than {made}")
        return data

    def _end(self, line: str) -> bytes:
        self._over = True
        self._report(line)
        return b""


# -------------------------------------------------------------------------------------------------
# A file worth reading, wherever it lies, and what is too much of it.

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
        opener: Opens its content, unpacked.
        head: Its first `HEAD_BYTES`, unpacked, to recognise it by.
        ratio: How far its head was packed (1 where it is not compressed).
        problems: Plain lines about what could not be read of it; reading adds to them.
    """

    name: str
    path: Path
    opener: Opener = field(repr=False)
    head: bytes = b""
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


class Progress:
    """Receives what is being done, in methods cheap enough to be called for every block. This one shows nothing."""

    def begin(self, text: str) -> None:
        """Record what begins now, such as `reading 8 Kineto traces`."""

    def advance(self, nbytes: int) -> None:
        """Record that `nbytes` more bytes, as they lie on disk, have been read."""

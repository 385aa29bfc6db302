"""Taking files in: what is packed is unpacked, archives are looked into, everything within bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from ringside.doctor.findings import Note
from ringside.doctor.progress import Progress
from ringside.doctor.sources import HEAD_BYTES, Gathered, Limits, Opener, Source
from ringside.doctor.streams import Careful, Gunzip, Readable, Slice, Tell, buffered

GZIP = b"\x1f\x8b"


@dataclass
class Context:
    """What the walk shares: limits, who hears of progress, what to close in the end, which archives it opens."""

    limits: Limits
    progress: Progress
    stack: ExitStack
    archives: Sequence[tuple[Callable[[bytes], bool], Callable[[Source, Context, int], None]]]
    found: Gathered = field(default_factory=Gathered)

    def add(self, source: Source, nesting: int) -> None:
        """Take a source in, after unpacking it; its head is read here.

        Args:
            source: A file, or a member of an archive.
            nesting: How many archives it lies in.
        """
        if len(self.found.sources) >= self.limits.files:
            self.refuse(source.name, f"is beyond the {self.limits.files} files that are looked at")
            return
        source.head = _head(source)
        while source.head[:2] == GZIP:
            if nesting > self.limits.nesting:
                self.refuse(source.name, f"is packed more than {self.limits.nesting} times and was left out")
                return
            self._unpack(source)
            nesting += 1
        look_into = next((open_it for is_one, open_it in self.archives if is_one(source.head)), None)
        if look_into is None:
            self.found.sources.append(source)
        elif nesting > self.limits.nesting:
            self.refuse(source.name, f"lies more than {self.limits.nesting} archives deep and was left out")
        else:
            look_into(source, self, nesting + 1)

    def _unpack(self, source: Source) -> None:
        """Put a gunzip over a source and read its head again."""
        beneath = source.opener
        source.opener = lambda tell: buffered(self.gunzip(beneath(tell), tell))
        with self.gunzip(beneath(source.tell), source.tell) as stream:
            source.head = _fill(stream)
            source.ratio = stream.ratio

    def refuse(self, name: str, why: str) -> None:
        """Note that a file is left out."""
        self.found.notes.append(Note(file=name, text=why, used=False))

    def gunzip(self, raw: Readable, tell: Tell) -> Gunzip:
        """Return the unpacked stream of a gzip file, within the limits."""
        limits = self.limits
        return Gunzip(
            raw,
            tell,
            most_bytes=limits.file_bytes,
            most_ratio=limits.ratio,
            ratio_after_bytes=limits.ratio_after_bytes,
        )

    def part(self, fd: int, offset: int, length: int) -> Opener:
        """Return an opener for a part of an open file, which counts what is read and survives errors."""
        count = self.progress.advance
        return lambda tell: buffered(Careful(Slice(fd, offset, length), tell, count))


def _head(source: Source) -> bytes:
    with source.open() as stream:
        return _fill(stream)


def _fill(stream: Readable) -> bytes:
    """The first `HEAD_BYTES` of a stream that may give less at a time."""
    head = b""
    while len(head) < HEAD_BYTES and (block := stream.read(HEAD_BYTES - len(head))):
        head += block
    return head

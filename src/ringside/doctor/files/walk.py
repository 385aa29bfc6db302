"""From paths to files worth reading: folders, globs, gzip, tar and zip, all of it within bounds.

Nothing is ever unpacked to a name taken from an archive: what must be unpacked goes to one file without a name.
"""

from __future__ import annotations

import glob
import io
import os
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

from ringside.doctor.files.source import (
    BUFFER_BYTES,
    GZIP,
    HEAD_BYTES,
    Careful,
    Gunzip,
    Limits,
    Opener,
    Progress,
    Report,
    Slice,
    Source,
    Stream,
    buffered,
)
from ringside.doctor.findings import Note
from ringside.text import natural_key, size

# -------------------------------------------------------------------------------------------------
# Adding files: what is packed is unpacked, archives are looked into, everything within bounds.


@dataclass
class Walk:
    """A walk over paths: the sources found, and notes on what was left out.

    Args:
        limits: What is too much.
        progress: Counts bytes as they are read.
        stack: What to close in the end.
    """

    limits: Limits
    progress: Progress
    stack: ExitStack
    sources: list[Source] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    def add(self, source: Source, nesting: int) -> None:
        """Add a source, after unpacking it; its head is read here.

        Args:
            source: A file, or a member of an archive.
            nesting: How many archives it lies in.
        """
        if len(self.sources) >= self.limits.files:
            self.refuse(source.name, f"is beyond the {self.limits.files} files that are looked at")
            return
        with source.open() as stream:
            source.head = _fill(stream)
        while source.head[:2] == GZIP:
            if nesting > self.limits.nesting:
                self.refuse(source.name, f"is packed more than {self.limits.nesting} times and was left out")
                return
            self._unpack(source)
            nesting += 1
        is_tar, is_zip = source.head[TAR_MAGIC] == b"ustar", source.head[:4] == b"PK\x03\x04"
        if not is_tar and not is_zip:
            self.sources.append(source)
        elif nesting > self.limits.nesting:
            self.refuse(source.name, f"is more than {self.limits.nesting} archives deep and was left out")
        else:
            (_add_tar if is_tar else _add_zip)(source, self, nesting + 1)

    def _unpack(self, source: Source) -> None:
        """Put a gunzip over a source and read its head again: what was packed may be packed twice."""
        beneath = source.opener
        source.opener = lambda report: buffered(Gunzip(beneath(report), report, self.limits))
        with Gunzip(beneath(source.note_problem), source.note_problem, self.limits) as stream:
            source.head = _fill(stream)
            source.ratio = stream.ratio

    def refuse(self, name: str, why: str) -> None:
        """Note that a file is left out."""
        self.notes.append(Note(file=name, text=why, used=False))

    def part(self, fd: int, offset: int, length: int) -> Opener:
        """Return an opener for a part of an open file, which counts what is read and survives errors."""
        count = self.progress.advance
        return lambda report: buffered(Careful(Slice(fd, offset, length), report, count))


def _fill(stream: Stream) -> bytes:
    """The first `HEAD_BYTES` of a stream that may give less at a time."""
    head = b""
    while len(head) < HEAD_BYTES and (block := stream.read(HEAD_BYTES - len(head))):
        head += block
    return head


# -------------------------------------------------------------------------------------------------
# Members of tar and zip archives as sources of their own; hostile names, links and bombs are left out with a line.

TAR_MAGIC = slice(257, 262)
MOST_HEADER_BYTES = 16 << 10
"""A path has at most 4096 bytes; `tarfile` takes quadratic time for what follows."""
MOST_NAME = 4096


def _add_tar(source: Source, walk: Walk, nesting: int) -> None:
    """Add the members of a tar archive: its bytes go to one nameless file, of which each member is a part."""
    spool = _spool(source, walk)
    end = spool.seek(0, os.SEEK_END)
    spool.seek(0)
    members = 0
    try:
        with tarfile.open(fileobj=cast("BinaryIO", _Headers(spool)), mode="r:") as archive:
            for member in archive:
                members += 1
                if member.size < 0:
                    raise tarfile.ReadError("a member of a negative size")
                if members > walk.limits.files:
                    walk.refuse(source.name, f"has more than {walk.limits.files} members; the rest was left out")
                    return
                name = f"{source.name}!{member.name}"
                if member.isdir():
                    continue
                if why := _hostile(member.name, walk):
                    walk.refuse(_short(name), why)
                elif member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                    walk.refuse(_short(name), "is a link, a device or a sparse file inside an archive and was left out")
                elif not _is_litter(member.name):
                    # of an archive that breaks off the last member's first bytes can still be read
                    whole = max(min(member.size, end - member.offset_data), 0)
                    inner = Source(name, source.path, walk.part(spool.fileno(), member.offset_data, whole))
                    if whole < member.size:
                        inner.problems.append(f"its archive breaks off: {size(whole)} of {size(member.size)} are whole")
                    walk.add(inner, nesting)
    except Exception as error:  # of a hostile archive tarfile raises anything at all
        source.note_problem(f"the archive breaks off after {members} members ({error})")
    if source.problems or not members:
        why = "; ".join(source.problems) or "is an archive without members"
        walk.refuse(source.name, f"{why}; {members} of its members were found" if source.problems else why)


class _Headers:
    """What `tarfile` reads of an archive: headers alone, none of them larger than any that is meant well."""

    def __init__(self, spool: BinaryIO) -> None:
        self.seek, self.tell, self._read = spool.seek, spool.tell, spool.read

    def read(self, nbytes: int) -> bytes:
        """Return `nbytes` bytes."""
        if not 0 <= nbytes <= MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {nbytes} bytes")
        return self._read(nbytes)


def _spool(source: Source, walk: Walk) -> BinaryIO:
    """The archive's bytes in a temporary file that has no name and lasts as long as the walk."""
    spool = cast("BinaryIO", walk.stack.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115
    walk.progress.begin(f"unpacking {source.name}")
    with source.open() as stream:
        try:
            shutil.copyfileobj(stream, spool, BUFFER_BYTES)
            spool.flush()
        except OSError as error:
            why = error.strerror or error
            source.note_problem(f"could not be unpacked whole: {why}; set TMPDIR to where there is room")
    return spool


def _add_zip(source: Source, walk: Walk, nesting: int) -> None:
    """Add the members of a zip archive."""
    spool = _spool(source, walk)
    try:
        archive = walk.stack.enter_context(zipfile.ZipFile(spool))
        members = archive.infolist()
    except Exception as error:  # of a hostile archive zipfile raises anything at all
        walk.refuse(source.name, f"is a zip archive that cannot be read ({error})")
        return
    for member in members[: walk.limits.files]:
        if not member.is_dir() and not _is_litter(member.filename):
            name, limits = f"{source.name}!{member.filename}", walk.limits
            bursts = member.file_size > max(limits.ratio * member.compress_size, limits.ratio_after_bytes)
            if why := _hostile(member.filename, walk):
                walk.refuse(_short(name), why)
            elif bursts or member.file_size > limits.file_bytes:
                packed, full = size(member.compress_size), size(member.file_size)
                walk.refuse(_short(name), f"refused as a compression bomb: {packed} unpack to {full}")
            elif member.flag_bits & 1:
                walk.refuse(_short(name), "is encrypted and was left out")
            else:
                walk.add(Source(name, source.path, _zip_opener(archive, member)), nesting)


def _zip_opener(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Opener:
    def opener(report: Report) -> BinaryIO:
        # opened when it is read, and not all members at once
        try:
            raw = archive.open(member)
        except Exception as error:  # likewise
            report(f"cannot be unpacked: {error}")
            return io.BytesIO()
        return buffered(Careful(raw, report, lambda _: None))

    return opener


def _hostile(name: str, walk: Walk) -> str:
    """Why a member's name is refused; empty where it is fine. (Nothing would be written there in any case.)"""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if len(name) > MOST_NAME:
        return f"has a name of {len(name)} characters and was left out"
    if name.startswith(("/", "\\")) or ".." in parts:
        return "has a path that leads out of its archive and was left out"
    if len(parts) > walk.limits.folder_depth:
        return f"is {len(parts)} levels deep in its archive (at most {walk.limits.folder_depth}) and was left out"
    return ""


def _is_litter(name: str) -> bool:
    """What macOS adds to archives."""
    return name.startswith("__MACOSX/") or name.rpartition("/")[2].startswith("._") or name.endswith(".DS_Store")


def _short(name: str) -> str:
    return name if len(name) <= 160 else f"{name[:100]}…{name[-40:]}"


# -------------------------------------------------------------------------------------------------
# From paths to files.


@contextmanager
def gather(
    paths: Sequence[str | Path], *, progress: Progress | None = None, limits: Limits | None = None
) -> Iterator[Walk]:
    """Find every file under `paths`; the sources can be read as long as the walk lasts.

    Args:
        paths: Files, folders, or globs (`**` included) where no file has that name.
        progress: Counts bytes as they are read.
        limits: What is too much.

    Yields:
        The sources in a stable order, each file once, and a note on everything left out.
    """
    with ExitStack() as stack:
        walk = Walk(limits or Limits(), progress or Progress(), stack)
        seen: set[tuple[int, int]] = set()
        for path in map(Path, paths):
            found = [path]
            if not path.exists() and not path.is_symlink():
                found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            if not found:
                walk.refuse(str(path), "does not exist; give files, folders or globs of what the run left behind")
            for match in found:
                for file in _folder(match, walk, 0) if match.is_dir() else [match]:
                    _add_file(file, walk, seen)
        yield walk


def _folder(folder: Path, walk: Walk, depth: int) -> Iterator[Path]:
    """All files of a folder, sorted, links to folders left alone."""
    if depth > walk.limits.folder_depth:
        walk.refuse(str(folder), f"is more than {walk.limits.folder_depth} folders deep and was left out")
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: natural_key(entry.name))
    except OSError as error:
        walk.refuse(str(folder), f"cannot be read: {error.strerror or error}")
        return
    if depth == 0 and not entries:
        walk.refuse(str(folder), "is an empty folder")
    # a link to a folder may lead in a circle
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _folder(folder / entry.name, walk, depth + 1)
        elif entry.is_file():
            yield folder / entry.name


def _add_file(path: Path, walk: Walk, seen: set[tuple[int, int]]) -> None:
    try:
        status = path.stat()
        # each file once, however many paths and links lead to it
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        if not path.is_file():
            walk.refuse(str(path), "is not a plain file and was left out")
            return
        with path.open("rb"):  # may it be read at all?
            pass
    except OSError as error:
        walk.refuse(str(path), f"cannot be read: {error.strerror or error}")
        return
    count = walk.progress.advance

    def opener(report: Report) -> BinaryIO:
        return buffered(Careful(path.open("rb", buffering=0), report, count))

    walk.add(Source(str(path), path, opener), nesting=0)

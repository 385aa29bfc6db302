"""From paths to files worth reading: folders, globs, gzip, tar and zip, all of it within bounds.

Nothing is ever unpacked to a name taken from an archive: what must be unpacked goes to one file without a name.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from ringside.doctor.files.archives import Context, add_tar, add_zip, is_tar, is_zip
from ringside.doctor.files.progress import Progress, Silent
from ringside.doctor.files.source import Gathered, Limits, Source
from ringside.doctor.files.streams import Careful, Report, buffered

ARCHIVES = ((is_tar, add_tar), (is_zip, add_zip))


@contextmanager
def gather(
    paths: Sequence[str | Path], *, progress: Progress | None = None, limits: Limits | None = None
) -> Iterator[Gathered]:
    """Find every file under `paths`; the sources can be read as long as the context lasts.

    Args:
        paths: Files, folders, or globs (`**` included) where no file has that name.
        progress: Counts bytes as they are read.
        limits: What is too much.

    Yields:
        The sources in a stable order, each file once, and a note on everything left out.
    """
    with ExitStack() as stack:
        context = Context(limits or Limits(), progress or Silent(), stack, ARCHIVES)
        seen: set[tuple[int, int]] = set()
        for path in map(Path, paths):
            files: Iterable[Path] = []
            if path.is_dir():
                files = _folder(path, context, 0)
            elif path.exists() or path.is_symlink():
                files = [path]
            elif found := [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]:
                files = chain.from_iterable(
                    _folder(match, context, 0) if match.is_dir() else [match] for match in found
                )
            else:
                context.refuse(str(path), "does not exist; give files, folders or globs of what the run left behind")
            for file in files:
                _add_file(file, context, seen)
        yield context.found


def _folder(folder: Path, context: Context, depth: int) -> Iterator[Path]:
    """All files of a folder, sorted, links to folders left alone."""
    if depth > context.limits.folder_depth:
        context.refuse(str(folder), f"is more than {context.limits.folder_depth} folders deep and was left out")
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: natural_key(entry.name))
    except OSError as error:
        context.refuse(str(folder), f"cannot be read: {error.strerror or error}")
        return
    if depth == 0 and not entries:
        context.refuse(str(folder), "is an empty folder")
    # a link to a folder may lead in a circle
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _folder(folder / entry.name, context, depth + 1)
        elif entry.is_file():
            yield folder / entry.name


def natural_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts `dump_2` before `dump_10`."""
    pieces: list[tuple[int, int | str]] = []
    digits = ""
    for char in name + "\0":
        if char.isascii() and char.isdigit():
            digits += char
            continue
        if digits:  # no name makes a number that takes long to compare
            pieces.append((0, int(digits[:18])))
            digits = ""
        pieces.append((1, char))
    return tuple(pieces)


def _add_file(path: Path, context: Context, seen: set[tuple[int, int]]) -> None:
    try:
        status = path.stat()
        # each file once, however many paths and links lead to it
        if (status.st_dev, status.st_ino) in seen:
            return
        seen.add((status.st_dev, status.st_ino))
        if not path.is_file():
            context.refuse(str(path), "is not a plain file and was left out")
            return
        with path.open("rb"):  # may it be read at all?
            pass
    except OSError as error:
        context.refuse(str(path), f"cannot be read: {error.strerror or error}")
        return
    count = context.progress.advance

    def opener(report: Report) -> BinaryIO:
        return buffered(Careful(path.open("rb", buffering=0), report, count))

    context.add(Source(str(path), path, b"", opener, status.st_size), nesting=0)

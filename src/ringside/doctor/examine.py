"""Paths in, findings out: every file to the reader that recognises it, every reader's findings together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ringside.doctor.findings import Findings, Note, merge
from ringside.doctor.progress import Progress, Silent
from ringside.doctor.reader import Reader, readers
from ringside.doctor.sources import Limits, Source
from ringside.doctor.walk import gather
from ringside.doctor.words import first_line

_log = logging.getLogger(__name__)
UNKNOWN = "is none of what the doctor reads"


def examine(paths: Sequence[str | Path], progress: Progress | None = None, *, limits: Limits | None = None) -> Findings:
    """Return what the files at `paths` say together.

    Args:
        paths: Files, folders and globs; `.gz`, `.tar`, `.tar.gz` and `.zip` are looked into.
        progress: Hears how far it is.
        limits: What is too deep, too large or too much.

    Returns:
        Findings with at least one note per file. Nothing readable means: no note is `used`.
    """
    progress = progress or Silent()
    with gather(paths, progress=progress, limits=limits or Limits()) as gathered:
        groups, unknown = _sort(gathered.sources)
        parts = [_read(reader, sources, progress) for reader, sources in groups]
        return merge([*parts, Findings(notes=[*unknown, *gathered.notes])])


def _sort(sources: Sequence[Source]) -> tuple[list[tuple[Reader, list[Source]]], list[Note]]:
    groups: list[tuple[Reader, list[Source]]] = [(reader, []) for reader in readers()]
    unknown = []
    for source in sources:
        for reader, members in groups:
            if _recognises(reader, source):
                members.append(source)
                break
        else:
            unknown.append(Note(file=source.name, text="; ".join([describe(source), *source.problems]), used=False))
    return [(reader, members) for reader, members in groups if members], unknown


def _recognises(reader: Reader, source: Source) -> bool:
    try:
        return reader.recognise(source)
    except Exception:
        _log.debug("%s failed to look at %s", reader.KIND, source.name, exc_info=True)
        return False


def _read(reader: Reader, sources: Sequence[Source], progress: Progress) -> Findings:
    """Let a reader read; if it fails, the files at which it fails are not used and all others still are."""
    progress.say(f"reading {len(sources)} {reader.KIND}{'' if len(sources) == 1 else 's'}")
    try:
        found = reader.read(sources, progress)
    except Exception as error:
        _log.debug("the reader of %ss failed", reader.KIND, exc_info=True)
        alone = [_failure(reader, source) for source in sources] if len(sources) > 1 else [error]
        whole = [source for source, failed in zip(sources, alone, strict=True) if failed is None]
        if len(whole) == len(sources):  # each can be read, but not all of them together
            whole, alone = [], [error] * len(sources)
        left_out = [
            Note(file=source.name, kind=reader.KIND, text=_unreadable(reader, failed), used=False)
            for source, failed in zip(sources, alone, strict=True)
            if failed is not None
        ]
        return merge([*([_read(reader, whole, progress)] if whole else []), Findings(notes=left_out)])
    notes = {note.file: note for note in found.notes}
    told = [_with_problems(notes.pop(source.name, None), source, reader) for source in sources]
    return msgspec.structs.replace(found, notes=[*told, *notes.values()])


def _failure(reader: Reader, source: Source) -> Exception | None:
    try:
        reader.read([source], Silent())
    except Exception as error:
        return error
    return None


def _unreadable(reader: Reader, error: Exception) -> str:
    return f"looks like a {reader.KIND} but could not be read: {type(error).__name__}: {first_line(str(error))}"


def _with_problems(note: Note | None, source: Source, reader: Reader) -> Note:
    """A file's one line, with what went wrong while it was read."""
    note = note or Note(file=source.name, kind=reader.KIND, text="read")
    problems = [line for line in source.problems if line not in note.text]
    return msgspec.structs.replace(note, text="; ".join([note.text, *problems]))


def describe(source: Source) -> str:
    """Return in a few words what an unrecognised file seems to be."""
    head = source.head
    if not head:
        return "is empty" if not source.problems else "holds nothing whole"
    if source.ratio > 300:
        return f"{UNKNOWN}: it unpacks {source.ratio:.0f}-fold, like a compression bomb, and was not unpacked"
    if b"\0" in head or sum(byte < 9 for byte in head) > len(head) // 100:
        return f"{UNKNOWN}: binary data"
    return f"{UNKNOWN}: it begins with {head[:40].decode('utf-8', 'replace').strip()!r}"

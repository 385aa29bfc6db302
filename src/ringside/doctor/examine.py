"""Paths in, findings out: every file to the reader that recognises it, every reader's findings together."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ringside.doctor import error_file, health_check, ras, ringside_run
from ringside.doctor.calls import clog, comma, inspector
from ringside.doctor.files.source import Limits, Progress, Source
from ringside.doctor.files.walk import gather
from ringside.doctor.findings import Findings, Note, merge
from ringside.doctor.flight_recorder import reader as flight_recorder
from ringside.doctor.kineto import reader as kineto
from ringside.doctor.nccl_log import reader as nccl_log
from ringside.doctor.pipeline import reader as pipeline
from ringside.text import first_line

# -------------------------------------------------------------------------------------------------
# What a reader is, and which ones there are.


class Reader(Protocol):
    """A module of this package that knows one kind of file."""

    KIND: str
    """What a file of this kind is called, in the singular: `flight-recorder dump`."""

    def matches(self, source: Source) -> bool:
        """Return whether a source is of this kind, from its content (`source.head`; open it only for more)."""

    def read(self, sources: Sequence[Source], progress: Progress) -> Findings:
        """Judge all files of this kind together, with a note per file; must not raise for bad content."""


READERS: tuple[Reader, ...] = (
    flight_recorder,
    ringside_run,
    error_file,
    health_check,
    inspector,
    comma,
    clog,
    ras,
    kineto,
    pipeline,
    nccl_log,
)
"""In the order in which they are tried; the first that matches a source gets it."""

_log = logging.getLogger(__name__)
UNKNOWN = "is of an unknown format"
MOST_LEFT_OUT = 100
"""Files of one kind that make their reader fail, beyond which all of that kind are left out."""


def examine(
    paths: Sequence[str | Path],
    progress: Progress | None = None,
    *,
    limits: Limits | None = None,
    readers: Sequence[Reader] = READERS,
) -> Findings:
    """Read all files at `paths` and judge them together.

    Args:
        paths: Files, folders and globs; `.gz`, `.tar`, `.tar.gz` and `.zip` are looked into.
        progress: Receives how far it is.
        limits: What is too deep, too large or too much.
        readers: Of which kinds; files of others are of an unknown format.

    Returns:
        Findings with at least one note per file. Nothing readable means: no note is `used`.
    """
    progress = progress or Progress()
    with gather(paths, progress=progress, limits=limits) as gathered, _collector_paused():
        # Every source to the first reader that knows its kind.
        groups: list[tuple[Reader, list[Source]]] = [(reader, []) for reader in readers]
        unknown = []
        for source in gathered.sources:
            for reader, members in groups:
                try:
                    matches = reader.matches(source)
                except Exception:
                    # a reader that fails to look at a file does not know it; the next one may
                    _log.debug("%s failed to look at %s", reader.KIND, source.name, exc_info=True)
                    matches = False
                if matches:
                    members.append(source)
                    break
            else:
                text = "; ".join([_describe_unknown(source), *source.problems])
                unknown.append(Note(file=source.name, text=text, used=False))
        parts = [_read(reader, sources, progress) for reader, sources in groups if sources]
        return merge([*parts, Findings(notes=[*unknown, *gathered.notes])])


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: millions of new values hold no circles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _read(reader: Reader, sources: Sequence[Source], progress: Progress) -> Findings:
    """Let a reader read; if it fails, the files at which it fails are not used and all others still are."""
    progress.begin(f"reading {len(sources)} {reader.KIND}{'' if len(sources) == 1 else 's'}")
    left_out: list[Note] = []
    while True:
        try:
            found = reader.read(sources, progress)
            break
        except Exception as error:
            _log.debug("the reader of %ss failed", reader.KIND, exc_info=True)
            # each try costs a reading of all: beyond so many the rest is left out at once
            few = len(left_out) < MOST_LEFT_OUT
            at_fault = _at_fault(reader, sources, error) if few else dict.fromkeys(sources, error)
            for source, why in at_fault.items():
                reason = f"{type(why).__name__}: {first_line(str(why))}"
                text = f"looks like a {reader.KIND} but could not be read: {reason}"
                left_out.append(Note(file=source.name, kind=reader.KIND, text=text, used=False))
            sources = [source for source in sources if source not in at_fault]
            if not sources:
                return Findings(notes=left_out)
    # One line per file, with what went wrong while it was read.
    notes = {note.file: note for note in found.notes}
    complete = []
    for source in sources:
        note = notes.pop(source.name, None) or Note(file=source.name, kind=reader.KIND, text="read")
        problems = [line for line in source.problems if line not in note.text]
        complete.append(msgspec.structs.replace(note, text="; ".join([note.text, *problems])))
    return msgspec.structs.replace(found, notes=[*complete, *notes.values(), *left_out])


def _at_fault(reader: Reader, sources: Sequence[Source], error: Exception) -> dict[Source, Exception]:
    """The files that cannot be read, each with the reason; at least one."""
    if len(sources) == 1:
        return {sources[0]: error}
    alone = {source: why for source in sources if (why := _failure(reader, [source])) is not None}
    if alone:
        return alone
    # Each can be read alone: look for the one that cannot be read together with those before it, by halves.
    fine, too_many = 1, len(sources)
    while too_many - fine > 1:
        middle = (fine + too_many) // 2
        fails = _failure(reader, sources[:middle]) is not None
        fine, too_many = (fine, middle) if fails else (middle, too_many)
    return {sources[fine]: error}


def _failure(reader: Reader, sources: Sequence[Source]) -> Exception | None:
    try:
        reader.read(sources, Progress())
    except Exception as error:
        return error
    return None


def _describe_unknown(source: Source) -> str:
    """Return in a few words what an unrecognised file seems to be."""
    head = source.head
    if not head:
        return "is empty" if not source.problems else "has no complete entry"
    if source.ratio > 300:
        return f"{UNKNOWN}: it unpacks {source.ratio:.0f}-fold, like a compression bomb, and was not unpacked"
    if b"\0" in head or sum(byte < 9 for byte in head) > len(head) // 100:
        return f"{UNKNOWN}: binary data"
    return f"{UNKNOWN}: it starts with {head[:40].decode('utf-8', 'replace').strip()!r}"

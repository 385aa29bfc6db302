"""What a reader is, and which ones there are."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Protocol, cast

from ringside.doctor.findings import Findings
from ringside.doctor.progress import Progress
from ringside.doctor.sources import Source

MODULES = (
    "flight_recorder",
    "ringside_run",
    "error_file",
    "kineto",
    "what_if",
    "nccl_log",
)
"""Readers in the order in which they are asked; the first that recognises a source gets it."""


class Reader(Protocol):
    """A module of this package that knows one kind of file."""

    KIND: str
    """What a file of this kind is called, in the singular: `flight-recorder dump`."""

    def recognise(self, source: Source) -> bool:
        """Return whether a source is of this kind, from its content (`source.head`; open it only for more)."""

    def read(self, sources: Sequence[Source], progress: Progress) -> Findings:
        """Return what all files of this kind say together, with a note per file; must not raise for bad content."""


@cache
def readers() -> tuple[Reader, ...]:
    """Return all readers, in the order of `MODULES`."""
    names = [f"ringside.doctor.{name}" for name in MODULES]
    known = [name for name in names if importlib.util.find_spec(name) is not None]
    return tuple(cast("Reader", importlib.import_module(name)) for name in known)

"""Which runs there are to show: those going on here, and those under a directory."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ringside.errors import RingsideError, UsageError
from ringside.monitor.alerts.book import as_text
from ringside.monitor.run.directory import RunReader, runs_under
from ringside.monitor.run.registry import running_runs
from ringside.view.server.feed import PageFeed

MOST_FEEDS = 8
MOST_LISTED = 200
IDLE_S = 300.0
"""A run that nobody looks at is not followed any longer."""


class Listed(NamedTuple):
    """A run of the index page.

    Args:
        key: What it is called in addresses; says nothing of its path.
        path: Its directory.
        name: Its name, always text.
        live: Whether a process here writes it.
        ranks: Number of ranks; 0 where it is not known.
        started_unix: When it began, seconds since 1970.
    """

    key: str
    path: Path
    name: str
    live: bool
    ranks: int
    started_unix: float


def newest_run(under: Path) -> Path:
    """Return the run to show when none was named: the newest that is going on here, else the newest under a directory.

    Raises:
        UsageError: There is none.
    """
    for entry in running_runs():
        return entry.directory
    found = runs_under(under)
    if not found:
        raise UsageError(
            f"no job is running here and there is no run under {under}/: start one with `ringside run train.py`, "
            "or give a run directory"
        )
    return found[0]


class Runs:
    """The runs, and a feed for each that somebody looks at.

    Args:
        first: The run to show first.
        under: Where runs lie.
        make: Makes a feed.
    """

    def __init__(self, first: Path, under: Path, make: Callable[[Path], PageFeed] = PageFeed) -> None:
        self._first, self._under, self._make = first.absolute(), under, make
        self._guard = threading.Lock()
        self._feeds: dict[str, PageFeed] = {}
        self._known = {key_of(self._first): self._first}

    def first(self) -> PageFeed:
        """Return the feed of the run to show first."""
        return self._feed(key_of(self._first))

    def find(self, key: str) -> PageFeed | None:
        """Return the feed of a run that was listed; None where there is no such key."""
        if key not in self._known:
            self.listed()
        return self._feed(key) if key in self._known else None

    def listed(self) -> list[Listed]:
        """Return the runs that are going on, then those under the directory, the newest first."""
        going = {entry.directory: entry for entry in running_runs()}
        found = []
        for path in dict.fromkeys(
            [*going, self._first, *(path.absolute() for path in runs_under(self._under)[:MOST_LISTED])]
        ):
            entry = going.get(path)
            if entry is not None:
                ranks, started = entry.world_size, entry.started_unix
            else:
                try:
                    info = RunReader(path).info
                    ranks, started = info.world_size, info.started_unix
                except RingsideError:
                    ranks, started = 0, 0.0
            found.append(Listed(key_of(path), path, as_text(path.name), entry is not None, ranks, started))
        self._known.update({run.key: run.path for run in found})
        return found[:MOST_LISTED]

    def close(self) -> None:
        """Stop following."""
        with self._guard:
            feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            feed.close()

    def _feed(self, key: str) -> PageFeed:
        with self._guard:
            if key not in self._feeds:
                # Feeds that nobody asks, and the longest idle ones where there are too many; the first run's stays.
                first = key_of(self._first)
                others = sorted((feed.asked, other) for other, feed in self._feeds.items() if other != first)
                for asked, other in others:
                    if time.monotonic() - asked > IDLE_S or len(self._feeds) >= MOST_FEEDS:
                        self._feeds.pop(other).close()
                self._feeds[key] = self._make(self._known[key])
            return self._feeds[key]


def key_of(path: Path) -> str:
    """Return what a run is called in addresses."""
    return hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]

"""The runs that the page shows, and a feed for each: one thread follows a directory, and no reader ever waits."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ringside.errors import RingsideError, UsageError
from ringside.monitor.alerts.book import AlertBook, as_text
from ringside.monitor.alerts.counters import MetricCounters, MetricsSnapshot
from ringside.monitor.collector import StepCollector
from ringside.monitor.links.sampler import LinkLedger
from ringside.monitor.run.directory import RUN, RunReader, runs_under
from ringside.monitor.run.records import RunInfo
from ringside.monitor.run.registry import Entry, running_runs
from ringside.view.run.live import QUIET_S, LiveRun
from ringside.view.run.log_follower import LogFollower
from ringside.view.server.history import History
from ringside.view.server.state import packed, page_state

POLL_S = 0.3
STALLED_S = 60.0
AT_ONCE = 50_000
"""Records that are read before the page is told of them: of 1,024 ranks 50 steps."""

_log = logging.getLogger(__name__)
_boots = itertools.count()


class PageFeed:
    """Follows a run directory, on a thread of its own.

    Args:
        path: The run directory; it need not be there yet.
        poll_s: How often to look.
        quiet_s: A run of no process here that wrote nothing for so long is judged as one that has ended.

    Attributes:
        path: The run directory.
        number: Grows whenever there is something new.
        asked: When somebody last asked, monotonic seconds.
    """

    def __init__(self, path: Path, *, poll_s: float = POLL_S, quiet_s: float = QUIET_S) -> None:
        self.path, self.number, self.asked = path, 0, time.monotonic()
        self._boot = f"{secrets.token_hex(4)}{next(_boots)}"
        self._poll_s = poll_s
        self._guard = threading.Lock()
        self._stop = threading.Event()
        self._live = LiveRun(path, at_once=AT_ONCE, quiet_s=quiet_s, follow_logs=LogFollower)
        self._shown: tuple[Any, ...] = ()
        self._trouble, self._begun = "", 0
        self._begin()
        self._state = self._encode(self._stage())
        self._thread = threading.Thread(target=self._follow, name="ringside-feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        self._thread.join()
        self._live.close()

    def state(self) -> tuple[int, bytes]:
        """Return the newest state: its number, and what `state.page_state` returns, as JSON."""
        self.asked = time.monotonic()
        return self.number, self._state

    def rows(self, since: int, epoch: str) -> bytes:
        """Return the steps that came since a serial, as JSON; from the beginning where the epoch is another by now.

        `steps` is base64 float64 [rows], `late` uint8 [rows, ranks], `worst` int32 [rows], `lines` float32 [rows] each
        (see `Rows`). `since` is what to ask for next time, `more` whether to ask at once.
        """
        with self._guard:
            rows = self._history.since(since if epoch == self.epoch else 0)
            found = {
                **self._place(),
                "rows": len(rows.steps),
                "steps": packed(rows.steps, np.float64),
                "late": packed(rows.late, np.uint8),
                "worst": packed(rows.worst, np.int32),
                "lines": {name: packed(values, np.float32) for name, values in rows.lines.items()},
                "since": rows.serial,
                "more": rows.more,
            }
            return msgspec.json.encode(found)

    def rank(self, rank: int) -> bytes | None:
        """Return one rank's times over all steps, as JSON of base64; None where there is no such rank."""
        with self._guard:
            if not 0 <= rank < self._history.ranks:
                return None
            steps, lines = self._history.rank(rank)
            packs = {name: packed(values, np.float32) for name, values in lines.items()}
            return msgspec.json.encode({**self._place(), "rank": rank, "steps": packed(steps, np.float64), **packs})

    def figures(self) -> MetricsSnapshot | None:
        """Return what `/metrics` shows; None before the run has begun."""
        with self._guard:
            if self._tally is None:
                return None
            return self._tally.snapshot(self._book.active, dict(self._book.opened), {})

    @property
    def epoch(self) -> str:
        """Another one means that earlier rows are void: the job was restarted, or the history thinned out."""
        return f"{self._boot}-{self._begun}-{self._history.stride}"

    def _place(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "ranks": self._history.ranks, "stride": self._history.stride}

    def _follow(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._poll()
                self._trouble = ""
            except RingsideError as error:
                self._trouble = str(error)
            except Exception as error:  # whatever a directory holds, the page stays up and says so
                if not self._trouble:
                    _log.warning("%s cannot be followed", self.path, exc_info=True)
                self._trouble = f"this run directory cannot be followed: {type(error).__name__}: {error}"
            # A state is sent only where something differs from the one that was sent before.
            stage = self._stage()
            shown = (self._live.version, stage, self._trouble)
            if shown != self._shown:
                try:
                    self._state = self._encode(stage)
                    self._shown, self.number = shown, self.number + 1
                except Exception:
                    _log.warning("%s: its state cannot be sent", self.path, exc_info=True)
            if self._trouble or not self._live.behind:
                self._stop.wait(max(self._poll_s, time.monotonic() - began))  # at most half of one core

    def _poll(self) -> None:
        following = self._live.following
        changed = self._live.poll()
        with self._guard:
            # Another run began in the directory: everything starts anew.
            if self._live.following is not following:
                self._begin()
            if changed:
                fresh = self._live.fresh
                self._history.add(self._ledger.reading(fresh))
                for event in self._live.fresh_events:
                    self._book.record(event)
                if self._tally is not None and self._collector is not None:
                    self._collector.add(fresh)
                    self._book.tick(self._collector.newest)
                    self._tally.add(fresh, self._collector)
        self._live.settle()

    def _begin(self) -> None:
        info = self._live.info
        self._begun += 1
        self._history = History(self._live.ranks)
        self._ledger = LinkLedger()
        self._book = AlertBook(info.name if info else "", str(self.path.absolute()))
        self._tally = MetricCounters(info) if info else None
        self._collector = StepCollector(info.world_size, watchers=[]) if info else None

    def _stage(self) -> str:
        if self._live.info is None:
            return "waiting" if self._shown or not (self.path / RUN).exists() else "reading"
        if self._live.behind:
            return "reading"
        if self._live.ended:
            return "ended"
        return "quiet" if self._live.is_abandoned() else "stalled" if self._live.age_s() > STALLED_S else "live"

    def _encode(self, stage: str) -> bytes:
        content = page_state(self._live, self._ledger.totals())
        last = time.time() - self._live.age_s()
        return msgspec.json.encode({**content, **self._place(), "serial": self._history.serial, "state": stage,
                                    "last_record_unix": last, "trouble": self._trouble})  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Which runs there are to show: those going on here, and those under a directory.

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
        """Return the runs that are going on, then the one to show first and those under the directory; newest first."""
        going = {entry.directory: entry for entry in running_runs()}
        found = []
        for path in dict.fromkeys(
            [*going, self._first, *(path.absolute() for path in runs_under(self._under)[:MOST_LISTED])]
        ):
            known: Entry | RunInfo | None = going.get(path)
            if known is None:
                with contextlib.suppress(RingsideError):
                    known = RunReader(path).info
            ranks, started = (known.world_size, known.started_unix) if known else (0, 0.0)
            found.append(Listed(key_of(path), path, as_text(path.name), path in going, ranks, started))
        found.sort(key=lambda run: (not run.live, -run.started_unix))
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

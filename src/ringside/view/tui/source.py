"""What `ringside top` shows: a run as it is now, as a value, and where it comes from."""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qs, urlencode, urlsplit, urlunsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError, UsageError
from ringside.monitor.assessment import UNKNOWN, Assessment, assess
from ringside.monitor.groups import Blocked
from ringside.monitor.run.directory import MOST_RANKS, STEPS, decode_record, open_regular
from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.verdict import Verdict
from ringside.text import size
from ringside.view.mesh_text import read_blocked
from ringside.view.run.follower import RECENT_STEPS, STEPS_KEPT, Floats32
from ringside.view.run.live import FIGURES, LiveRun, RankNow, ranks_now
from ringside.view.run.log_follower import LogFollower
from ringside.view.verdict_text import Calm

TAIL_BYTES = 8 << 20
"""So much of the end of `steps.jsonl` is looked through for one rank's records."""

AT_ONCE = 10_000
"""Records of a long run that are read before it is shown how far the reading is: less than 0.1 s."""

LATEST_STEP = 1 << 62


@dataclass(frozen=True)
class Open:
    """A verdict as it stands.

    Args:
        verdict: As it was reached.
        cost_rank_seconds: Its price so far.
        over: Whether its episode has ended.
        words: Its headline, where another program put it in words.
    """

    verdict: Verdict
    cost_rank_seconds: float
    over: bool
    words: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Args:
        where: The run directory or address.
        info: What was known at its start; None before.
        stage: `starting`, `training`, `comparison` or `ended`.
        step: The newest step of any rank, −1 before the first.
        recorded: Number of steps that were recorded.
        of: How many steps are planned; 0 where that is not known.
        ranks: Every rank's figures.
        verdicts: Those that are open first, then by time.
        steps: The training steps of `own_seconds`, ascending, int64 [steps].
        own_seconds: Own time, float32 [steps, ranks]; NaN where nothing is known.
        trouble: Why no more can be seen, one sentence; empty where all is well.
        version: Grows with whatever changed.
        detail: The newest records of the rank that was asked for, oldest first.
        notes: What else happened, in words, oldest first.
        window: What the ranks' figures are medians of, in words.
        calm: What an ended run without a verdict says; None of others.
        undecided: What the detector has not decided, in words.
        assessment: What that makes of a run without a verdict.
        reading: What is read and judged first, in words; empty once that is done.
        blocked: How long ranks are blocked along each dimension of the mesh.
    """

    where: str
    info: RunInfo | None
    stage: str
    step: int
    recorded: int
    of: int
    ranks: tuple[RankNow, ...]
    verdicts: tuple[Open, ...]
    steps: NDArray[np.int64]
    own_seconds: Floats32
    trouble: str = ""
    version: int = 0
    detail: tuple[StepRecord, ...] = ()
    notes: tuple[str, ...] = ()
    window: str = f"last {RECENT_STEPS} steps"
    calm: Calm | None = None
    undecided: str = ""
    assessment: Assessment = UNKNOWN
    reading: str = ""
    blocked: tuple[Blocked, ...] = ()


class RunSource(Protocol):
    """Where a run is seen: on this machine's disk, or at an address."""

    where: str

    def poll(self) -> bool:
        """Read what is new; return whether anything changed. Takes its time; raises `RingsideError`."""

    def snapshot(self) -> Snapshot:
        """Return the run as far as it was read."""

    def records(self, rank: int) -> list[StepRecord]:
        """Return the newest records of one rank, oldest first; empty where they cannot be had."""


def take_snapshot(source: RunSource, rank: int | None = None) -> Snapshot:
    """Poll once and return the run, with one rank's records where `rank` is given; trouble is part of the value."""
    trouble = ""
    try:
        source.poll()
    except RingsideError as error:
        trouble = str(error)
    snapshot = replace(source.snapshot(), trouble=trouble)
    if rank is not None:
        with contextlib.suppress(RingsideError):
            snapshot = replace(snapshot, detail=tuple(source.records(rank)))
    return snapshot


class Local:
    """A run directory on this machine.

    Args:
        path: The run directory; it need not be there yet.
        tail_bytes: How much of the end of its records is read for those of one rank.
        at_once: Records that one poll reads at most. Reading and judging a run of 256 MB takes ten seconds: polls then
            say how far they are, and one of its own judges it. None: one poll does it all.

    Attributes:
        where: That directory, as text.
    """

    def __init__(self, path: Path, *, tail_bytes: int = TAIL_BYTES, at_once: int | None = None) -> None:
        self.where = str(path)
        self._tail_bytes = tail_bytes
        self._path = path
        self._live = LiveRun(path, at_once=at_once, follow_logs=LogFollower)
        self._at_once = at_once
        self._reading = ""

    def poll(self) -> bool:
        """Read what was added; return whether anything changed.

        Raises:
            RingsideError: The run cannot be read (any more): it is of another schema, damaged, or not permitted.
        """
        live = self._live
        try:
            changed = live.poll()
            # The poll after the one that reached the end of a long run judges it.
            is_long = self._at_once is not None and live.records_read >= self._at_once
            if live.behind or (is_long and changed and live.is_unjudged()):
                self._reading = f"reading {_file_size(self._path / STEPS)} of records: {live.records_read:,} so far …"
                return True
            self._reading = ""
            return live.settle() or changed
        except RingsideError:  # some of them are ValueErrors
            raise
        except (ValueError, TypeError, IndexError, OverflowError, KeyError) as error:
            raise RingsideError(
                f"a part of {self.where} is damaged and was left out ({type(error).__name__}); look into events.jsonl"
            ) from error

    def snapshot(self) -> Snapshot:
        """Return the run as far as it was read."""
        live, run = self._live, self._live.following
        return Snapshot(
            where=self.where,
            info=live.info,
            stage=live.stage,
            step=run.step,
            recorded=run.steps,
            of=run.of,
            ranks=tuple(live.now()),
            verdicts=tuple(Open(finding.verdict, finding.cost_rank_seconds, finding.over) for finding in live.findings),
            steps=live.recent.steps(),
            own_seconds=live.recent.rows("own_seconds"),
            version=live.version,
            notes=tuple(live.notes),
            window=live.window,
            calm=live.calm,
            undecided=run.undecided.describe(),
            assessment=assess(run.undecided),
            reading=self._reading,
            blocked=tuple(live.blocked()),
        )

    def records(self, rank: int) -> list[StepRecord]:
        """Return the newest records of one rank, oldest first, as far as the end of the file holds them."""
        with contextlib.suppress(OSError), open_regular(self._path / STEPS) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - self._tail_bytes, 0))
            # Both ends of what is read may be torn.
            lines = file.read(self._tail_bytes).split(b"\n")[int(size > self._tail_bytes) : -1]
            sign = b'"rank":%d,' % rank  # before decoding: most lines are other ranks'
            decoded = (decode_record(line) for line in lines if sign in line)
            records = [each for each in decoded if each and each.rank == rank and 0 <= each.step < LATEST_STEP]
            return sorted(records, key=lambda record: record.step)
        return []


def _file_size(path: Path) -> str:
    try:
        return size(path.stat().st_size)
    except OSError:  # it has just been removed
        return "0 B"


# -------------------------------------------------------------------------------------------------
# A run seen over the network: what `ringside serve` sends at /api.
#
# Every request is bounded in time and size, follows no redirect, and goes to the address itself, past any proxy. What
# comes back is validated like a file of somebody else's.

TIMEOUT_S = 5.0
"""For an answer to begin, and between two parts of it."""

WHOLE_S = 20.0
MOST_BYTES = 64 << 20
PAGES = 8
"""Requests for steps in one poll at most; what is left comes with the next."""

_Kind = TypeVar("_Kind")


class _Verdict(msgspec.Struct, kw_only=True):
    headline: str
    why: str = ""
    next: str = ""
    kind: str
    ranks: list[int]
    since_step: int
    cost_rank_seconds: float = 0.0
    over: bool = False
    by_way_of: str = ""


class _Mesh(msgspec.Struct, kw_only=True):
    dimensions: list[str] = []
    coordinates: str = ""


class _Now(msgspec.Struct, kw_only=True):
    name: str = ""
    stage: str = "starting"
    step: int = -1
    steps: int = 0
    of: int = 0
    ranks: int = 0
    engine: str = ""
    algorithm: str = ""
    started_unix: float = 0.0
    hosts: list[str] = []
    host_of: str = ""
    verdicts: list[_Verdict] = []
    figures: dict[str, str] = {}
    trouble: str = ""
    notes: list[str] = []
    window: str = f"last {RECENT_STEPS} steps"
    calm: Calm | None = None
    undecided: str = ""
    assessment: Assessment = UNKNOWN
    mesh: _Mesh = msgspec.field(default_factory=_Mesh)
    blocked: list[dict[str, Any]] = []


class _Rows(msgspec.Struct, kw_only=True):
    epoch: str
    steps: str
    late: str
    lines: dict[str, str]
    since: int
    more: bool = False


class _Rank(msgspec.Struct, kw_only=True):
    steps: str
    own: str
    wait: str
    wire: str


class Remote:
    """A run at an address where `ringside serve` answers.

    Args:
        url: `http://host:port`, or that of one run there; a token may be in it as `?token=...`.
        token: What readers must send; empty: nothing.

    Attributes:
        where: The address, without the token.

    Raises:
        UsageError: It is no such address.
    """

    def __init__(self, url: str, token: str = "") -> None:
        parts = None
        with contextlib.suppress(ValueError):  # no port, or half an IPv6 address
            split = urlsplit(url)
            if split.scheme in ("http", "https") and split.hostname and split.port != 0:
                parts = split
        if parts is None:
            raise UsageError(f"{url!r} is no address; give for example http://127.0.0.1:8777")
        token = parse_qs(parts.query).get("token", [token])[0]
        self.where = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        self._now, self._body, self._version = _Now(), b"", 0
        self._epoch, self._since = "", 0
        self._rows: dict[int, Floats32] = {}

    def poll(self) -> bool:
        """Ask what is new; return whether anything changed.

        Raises:
            RingsideError: Nobody answers, or not as `ringside serve` does; or the run has trouble there.
        """
        body = self._get("api/now")
        changed = body != self._body
        if changed:
            now = self._decode(body, _Now)
            if not 0 <= now.ranks <= MOST_RANKS:
                raise RingsideError(f"{self.where} reports {now.ranks} ranks, which is impossible")
            if now.ranks != self._now.ranks:
                self._rows = {}
            self._now, self._body, self._version = now, body, self._version + 1
            self._read_rows()
        if self._now.trouble:
            raise RingsideError(self._now.trouble)
        return changed

    def snapshot(self) -> Snapshot:
        """Return the run as far as it was received."""
        now = self._now
        places = self._unpack(now.host_of, "<i4").tolist()
        hosts = [now.hosts[place] if 0 <= place < len(now.hosts) else "" for place in places]
        verdicts = []
        for sent in now.verdicts:
            with contextlib.suppress(ValueError):  # a kind that a newer version knows
                verdict = Verdict(
                    kind=sent.kind, ranks=sent.ranks, since_step=sent.since_step, detected_step=sent.since_step,
                    excess_ratio=math.nan, cause=sent.why, advice=sent.next,
                    evidence={"by_way_of": sent.by_way_of} if sent.by_way_of else {},
                )  # fmt: skip
                words = sent.headline[:1].lower() + sent.headline[1:].rstrip(".")
                verdicts.append(Open(verdict, sent.cost_rank_seconds, sent.over, words))
        blocked = [{**sent, "ranks": self._unpack(str(sent.get("ranks", "")), "<f4").tolist()} for sent in now.blocked]
        steps = np.array(sorted(self._rows), dtype=np.int64)
        empty = np.empty((0, now.ranks), dtype=np.float32)
        info = RunInfo(
            schema=SCHEMA, name=now.name, started_unix=now.started_unix, command=[], world_size=now.ranks,
            hosts=hosts, pids=[], engine=now.engine, algorithm=now.algorithm,
        )  # fmt: skip
        return Snapshot(
            where=self.where,
            info=info if now.ranks else None,
            stage=now.stage,
            step=now.step,
            recorded=now.steps,
            of=now.of,
            ranks=tuple(self._ranks(hosts)),
            verdicts=tuple(verdicts),
            steps=steps,
            own_seconds=np.stack([self._rows[int(step)] for step in steps]) if len(steps) else empty,
            version=self._version,
            notes=tuple(now.notes),
            window=now.window,
            calm=now.calm,
            undecided=now.undecided,
            assessment=now.assessment,
            blocked=tuple(read_blocked({"blocked": blocked})),
        )

    def records(self, rank: int) -> list[StepRecord]:
        """Return the newest steps of one rank, oldest first: own, wait and wire; nothing else is sent.

        Raises:
            RingsideError: Nobody answers.
        """
        sent = self._decode(self._get(f"api/rank?{urlencode({'rank': rank})}"), _Rank)
        steps = self._unpack(sent.steps, "<f8")[-STEPS_KEPT:]
        columns = [self._unpack(text, "<f4")[-STEPS_KEPT:] for text in (sent.own, sent.wait, sent.wire)]
        return [
            StepRecord(
                step=int(step), rank=rank, ended_unix=0.0, step_seconds=math.nan, own_seconds=float(own),
                wait_seconds=float(wait), wire_seconds=float(wire),
            )
            for step, own, wait, wire in zip(steps, *columns, strict=False)
            if 0 <= step < LATEST_STEP
        ]  # fmt: skip

    def _ranks(self, hosts: Sequence[str]) -> list[RankNow]:
        named = [(verdict.kind, verdict.ranks) for verdict in self._now.verdicts if not verdict.over]
        steps = self._column("step", "<f8")
        figures = {name: self._column(name, "<f4") for name in FIGURES}
        return ranks_now(hosts, named, np.where(np.isfinite(steps), steps, -1), figures, self._coordinates())

    def _coordinates(self) -> list[dict[str, int]]:
        """Where each rank is in the mesh; empty where that was not sent, or not of every rank."""
        names, indexes = self._now.mesh.dimensions, self._unpack(self._now.mesh.coordinates, "<i4")
        if not names or len(indexes) != len(names) * self._now.ranks:
            return []
        places = indexes.reshape(self._now.ranks, len(names)).tolist()
        return [{name: index for name, index in zip(names, place, strict=True) if index >= 0} for place in places]

    def _column(self, name: str, kind: str) -> NDArray[Any]:
        """One figure of every rank; NaN where it was not sent."""
        values = self._unpack(self._now.figures.get(name, ""), kind)[: self._now.ranks]
        return np.concatenate([values, np.full(self._now.ranks - len(values), np.nan)])

    def _read_rows(self) -> None:
        """Read the steps that are new: how late each rank was, which with the median is its own time again."""
        for _ in range(PAGES):
            query = urlencode({"since": self._since, "epoch": self._epoch})
            rows = self._decode(self._get(f"api/steps?{query}"), _Rows)
            if rows.epoch != self._epoch:
                self._rows = {}
            self._epoch, self._since = rows.epoch, rows.since
            steps, codes = self._unpack(rows.steps, "<f8"), self._unpack(rows.late, "u1").astype(np.float32)
            median = self._unpack(rows.lines.get("own", ""), "<f4")
            if len(codes) != len(steps) * self._now.ranks or len(median) != len(steps):
                # The job began (anew) between two requests: the next poll reads it all.
                self._epoch, self._rows = "", {}
                break
            # A code is the root of the lateness, in 254 parts from 1 on; 0 where it is not known.
            late = np.where(codes > 0, np.square((codes - 1) / 254), np.nan).reshape(len(steps), self._now.ranks)
            own = (median[:, None] * (1 + late)).astype(np.float32)
            known = np.isfinite(steps) & (steps >= 0) & (steps < LATEST_STEP)
            self._rows.update({int(step): row for step, row in zip(steps[known], own[known], strict=True)})
            for step in sorted(self._rows)[:-STEPS_KEPT]:
                del self._rows[step]
            if not rows.more:
                break

    def _unpack(self, text: str, kind: str) -> NDArray[Any]:
        try:
            return np.frombuffer(base64.b64decode(text, validate=True), dtype=kind)
        except (binascii.Error, ValueError):
            raise RingsideError(f"{self.where} sends something else than `ringside serve` does") from None

    def _decode(self, body: bytes, kind: type[_Kind]) -> _Kind:
        try:
            return msgspec.json.decode(body, type=kind)
        except UNDECODABLE:
            raise RingsideError(f"{self.where} answers, but not as `ringside serve` of this version does") from None

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(f"{self.where}/{path}", headers=self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as response:
                until, parts, size = time.monotonic() + WHOLE_S, [], 0
                while part := response.read1(1 << 20):
                    parts.append(part)
                    size += len(part)
                    if size > MOST_BYTES or time.monotonic() > until:
                        raise RingsideError(f"{self.where} sends more than a run has, or too slowly; look at it there")
                return b"".join(parts)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (401, 403):
                hint = "add ?token=... to the address, or set RINGSIDE_SERVE_TOKEN"
                raise RingsideError(f"{self.where} needs a token: {hint}") from None
            hint = "give the address that `ringside serve` printed"
            raise RingsideError(f"{self.where} answers with status {error.code}: {hint}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", None) or error
            reason = getattr(cause, "strerror", None) or cause
            raise RingsideError(f"{self.where} does not answer ({reason}); does `ringside serve` run there?") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to wherever it leads."""

    def redirect_request(self, *_: object) -> None:
        """Follow none."""

"""A run seen over the network: what `ringside serve` says at /api, for `ringside top http://host:port`.

Every request is bounded in time and size, follows no redirect, and goes to the address itself, past any proxy. What
comes back is validated like a file of somebody else's.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import math
import time
import urllib.error
import urllib.request
from typing import Any, TypeVar
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit, urlunsplit

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError, UsageError
from ringside.monitor.run.directory import MOST_RANKS
from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.verdict import Verdict
from ringside.view.run.live import STEPS_KEPT, RankNow
from ringside.view.tui.source import LATEST_STEP, Open, Snapshot

TIMEOUT_S = 5.0
"""For an answer to begin, and between two parts of it."""

WHOLE_S = 20.0
MOST_BYTES = 64 << 20
PAGES = 8
"""Requests for steps in one look at most; what is left comes with the next."""

_Kind = TypeVar("_Kind")


class _Told(msgspec.Struct, kw_only=True):
    headline: str
    why: str = ""
    next: str = ""
    kind: str
    ranks: list[int]
    since_step: int
    cost_rank_seconds: float = 0.0
    over: bool = False


class _Now(msgspec.Struct, kw_only=True):
    name: str = ""
    stage: str = "starting"
    step: int = -1
    of: int = 0
    ranks: int = 0
    engine: str = ""
    algorithm: str = ""
    started_unix: float = 0.0
    hosts: list[str] = []
    host_of: str = ""
    verdicts: list[_Told] = []
    figures: dict[str, str] = {}
    trouble: str = ""
    notes: list[str] = []


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


def _parts(url: str) -> SplitResult:
    with contextlib.suppress(ValueError):  # no port, or half an IPv6 address
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts
    raise UsageError(f"{url!r} is no address; give for example http://127.0.0.1:8777")


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
        parts = _parts(url)
        asked = parse_qs(parts.query).get("token", [token])[0]
        self.where = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        self._headers = {"Authorization": f"Bearer {asked}"} if asked else {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
        self._now, self._body, self._version = _Now(), b"", 0
        self._epoch, self._since = "", 0
        self._rows: dict[int, NDArray[np.float32]] = {}

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
                raise RingsideError(f"{self.where} says that the run has {now.ranks} ranks: that cannot be")
            if now.ranks != self._now.ranks:
                self._rows = {}
            self._now, self._body, self._version = now, body, self._version + 1
            self._read_rows()
        if self._now.trouble:
            raise RingsideError(self._now.trouble)
        return changed

    def snapshot(self) -> Snapshot:
        """Return the run as far as it was told."""
        now = self._now
        steps = np.array(sorted(self._rows), dtype=np.int64)
        empty = np.empty((0, now.ranks), dtype=np.float32)
        return Snapshot(
            where=self.where,
            info=self._info(),
            stage=now.stage,
            step=now.step,
            of=now.of,
            ranks=self._ranks(),
            verdicts=tuple(one for one in map(_open, now.verdicts) if one is not None),
            steps=steps,
            own_seconds=np.stack([self._rows[int(step)] for step in steps]) if len(steps) else empty,
            version=self._version,
            notes=tuple(now.notes),
        )

    def records(self, rank: int) -> list[StepRecord]:
        """Return the newest steps of one rank, oldest first: own, wait and wire; nothing else is told.

        Raises:
            RingsideError: Nobody answers.
        """
        told = self._decode(self._get(f"api/rank?{urlencode({'rank': rank})}"), _Rank)
        steps = self._unpack(told.steps, "<f8")[-STEPS_KEPT:]
        columns = [self._unpack(text, "<f4")[-STEPS_KEPT:] for text in (told.own, told.wait, told.wire)]
        return [
            StepRecord(
                step=int(step), rank=rank, ended_unix=0.0, step_seconds=math.nan, own_seconds=float(own),
                wait_seconds=float(wait), wire_seconds=float(wire),
            )
            for step, own, wait, wire in zip(steps, *columns, strict=False)
            if 0 <= step < LATEST_STEP
        ]  # fmt: skip

    def _info(self) -> RunInfo | None:
        now = self._now
        if not now.ranks:
            return None
        return RunInfo(
            schema=SCHEMA, name=now.name, started_unix=now.started_unix, command=[], world_size=now.ranks,
            hosts=self._hosts(), pids=[], engine=now.engine, algorithm=now.algorithm,
        )  # fmt: skip

    def _hosts(self) -> list[str]:
        places = self._unpack(self._now.host_of, "<i4")
        hosts = self._now.hosts
        return [hosts[place] if 0 <= place < len(hosts) else "" for place in places.tolist()]

    def _ranks(self) -> tuple[RankNow, ...]:
        now, hosts = self._now, self._hosts()
        named: dict[int, list[str]] = {}
        for one in now.verdicts:
            for rank in () if one.over else one.ranks:
                named.setdefault(rank, []).append(one.kind)
        own, wait, wire = (self._column(f"{name}_seconds", "<f4").tolist() for name in ("own", "wait", "wire"))
        excess, steps = self._column("excess_ratio", "<f4").tolist(), self._column("step", "<f8")
        return tuple(
            RankNow(
                rank=rank,
                host=hosts[rank] if rank < len(hosts) else "",
                step=int(steps[rank]) if math.isfinite(steps[rank]) else -1,
                own_seconds=own[rank],
                wait_seconds=wait[rank],
                wire_seconds=wire[rank],
                excess_ratio=excess[rank],
                verdicts=tuple(named.get(rank, ())),
            )
            for rank in range(now.ranks)
        )

    def _column(self, name: str, kind: str) -> NDArray[Any]:
        """One figure of every rank; NaN where it was not told."""
        values = self._unpack(self._now.figures.get(name, ""), kind)[: self._now.ranks]
        return np.concatenate([values, np.full(self._now.ranks - len(values), np.nan)])

    def _read_rows(self) -> None:
        """Read the steps that are new: how late each rank was, which with the median is its own time again."""
        for _ in range(PAGES):
            asked = urlencode({"since": self._since, "epoch": self._epoch})
            rows = self._decode(self._get(f"api/steps?{asked}"), _Rows)
            if rows.epoch != self._epoch:
                self._rows = {}
            self._epoch, self._since = rows.epoch, rows.since
            if not self._take(rows):  # the job began (anew) between two requests: the next look asks for all
                self._epoch, self._rows = "", {}
                break
            if not rows.more:
                break

    def _take(self, rows: _Rows) -> bool:
        """Keep the newest steps; return whether they are of as many ranks as there are."""
        steps, late = self._unpack(rows.steps, "<f8"), self._unpack(rows.late, "u1").astype(np.float32)
        middle = self._unpack(rows.lines.get("own", ""), "<f4")
        if len(late) != len(steps) * self._now.ranks or len(middle) != len(steps):
            return False
        late = np.where(late > 0, np.square((late - 1) / 254), np.nan).reshape(len(steps), self._now.ranks)
        own = (middle[:, None] * (1 + late)).astype(np.float32)
        known = np.isfinite(steps) & (steps >= 0) & (steps < LATEST_STEP)
        self._rows.update({int(step): row for step, row in zip(steps[known], own[known], strict=True)})
        for step in sorted(self._rows)[:-STEPS_KEPT]:
            del self._rows[step]
        return True

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
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return self._read(answer)
        except urllib.error.HTTPError as error:
            error.close()
            raise RingsideError(self._refused(error.code)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise RingsideError(f"{self.where} does not answer ({reason}); does `ringside serve` run there?") from None

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        until, parts, size = time.monotonic() + WHOLE_S, [], 0
        while part := answer.read1(1 << 20):
            parts.append(part)
            size += len(part)
            if size > MOST_BYTES or time.monotonic() > until:
                raise RingsideError(f"{self.where} sends more than a run has, or too slowly; look at it there")
        return b"".join(parts)

    def _refused(self, status: int) -> str:
        if status in (401, 403):
            return f"{self.where} needs a token: add ?token=... to the address, or set RINGSIDE_SERVE_TOKEN"
        return f"{self.where} answers with status {status}: give the address that `ringside serve` printed"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the token to wherever it leads."""

    def redirect_request(self, *_: object) -> None:
        """Follow none."""


def _open(told: _Told) -> Open | None:
    try:
        verdict = Verdict(
            kind=told.kind, ranks=told.ranks, since_step=told.since_step, detected_step=told.since_step,
            excess_ratio=math.nan, cause=told.why, advice=told.next,
        )  # fmt: skip
    except ValueError:  # a kind that a newer version knows
        return None
    words = told.headline[:1].lower() + told.headline[1:].rstrip(".")
    return Open(verdict, told.cost_rank_seconds, told.over, words)

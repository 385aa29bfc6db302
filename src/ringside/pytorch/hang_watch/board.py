"""A page of memory per rank that shows where it stands; the other ranks of its host read it at any time.

The training thread writes numbers into it, which costs about a microsecond per collective, needs no lock and no store,
and can be read even if the rank is stopped or its Python does not run. A reader may see a half of a change; whoever
judges only believes what has not changed for seconds.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.errors import DeadlineError, MismatchError, PeerLostError, SyncError
from ringside.monitor.hang.attribution import LIMIT_S, NORMAL_WAITS, WARM_UP_PASSES, Failure, RankState, WaitingCall

PAGE_BYTES = 65536  # of which memory has what is written
CALLS_KEPT = 64
OPS = ("all_reduce", "the script's own hook")

_FIELDS = {
    "left": "q",
    "synced": "q",
    "longest_s": "d",
    "step": "q",
    "group_seq": "q",
    "beat_at": "d",
    "call_since": "d",
    "group_moved_at": "d",
    "call_bytes": "q",
    "entered": "q",
    "moved_at": "d",
    "waiting_since": "d",
    "episode": "q",
    "dumped": "q",
    "spoken": "q",
}
"""The page's numbers, 8 bytes each, by name: `struct`'s code of each."""
_HEAD = struct.Struct("=" + "".join(_FIELDS.values()))
_AT = {name: 8 * index for index, name in enumerate(_FIELDS)}
_CALL, _CALLS_AT = struct.Struct("=qqq"), 512
_TEXTS = {
    "call": (2176, 64),
    "where": (2240, 256),
    "failure": (2496, 4096),
    "awaited": (8192, 32768),
    "counts": (40960, 24576),
}
_q, _d = struct.Struct("=q").pack_into, struct.Struct("=d").pack_into
_ENTER = struct.Struct("=qd").pack_into
_LENGTH = struct.Struct("=H")
_NEWEST = 8
_ENTERED, _MOVED, _WAITING = _AT["entered"], _AT["moved_at"], _AT["waiting_since"]
_encode, _decode_failure = msgspec.json.encode, msgspec.json.Decoder(Failure).decode
_decode_awaited = msgspec.json.Decoder(tuple[str, int, list[int]]).decode
_decode_counts = msgspec.json.Decoder(dict[str, int]).decode


class ProgressPage:
    """This rank's page, written by its training thread (`entered`, `waiting`, `resumed`, `failed`) and its watcher.

    Attributes:
        fd: The page, as an anonymous file; -1 once closed.
        handed_over: Gradient collectives so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, hang_s: float = LIMIT_S) -> None:
        self._clock, self._hang_s = clock, hang_s
        self.fd = os.memfd_create("ringside-watch")
        os.ftruncate(self.fd, PAGE_BYTES)
        self._page: Any = mmap.mmap(self.fd, PAGE_BYTES)
        self.handed_over = 0
        self._synced = 0
        self._longest_s = 0.0
        self._since = 0.0
        for field in ("moved_at", "group_moved_at", "beat_at"):
            self.put(field, clock())

    # -------------------------------------------------------------------------------------------- training thread

    def entered(self, size_bytes: int, op: int = 0) -> None:
        """This rank hands over a gradient collective."""
        seq = self.handed_over = self.handed_over + 1
        page = self._page
        _CALL.pack_into(page, _CALLS_AT + seq % CALLS_KEPT * 24, seq, size_bytes, op)
        _ENTER(page, _ENTERED, seq, self._clock())

    def waiting(self) -> None:
        """This rank is blocked from now on until its gradient collectives are done."""
        now = self._since = self._clock()
        _d(self._page, _MOVED, now)
        _d(self._page, _WAITING, now)

    def resumed(self) -> None:
        """They are done."""
        now, page = self._clock(), self._page
        _d(page, _WAITING, 0.0)
        _d(page, _MOVED, now)
        self._synced += 1
        _q(page, _AT["synced"], self._synced)
        # The longest wait so far tells a hang from this job's usual waits; one that was nearly a hang itself, or while
        # the first passes warm up, is no measure.
        waited = now - self._since
        if (
            self._longest_s < waited < max(self._hang_s, NORMAL_WAITS * self._longest_s)
            and self._synced > WARM_UP_PASSES
        ):
            self._longest_s = waited
            _d(page, _AT["longest_s"], waited)

    def failed(self, error: BaseException) -> None:
        """They could not be done."""
        kinds = {MismatchError: "mismatch", DeadlineError: "late", PeerLostError: "lost"}
        kind = next((name for cls, name in kinds.items() if isinstance(error, cls)), "other")
        ranks = list(error.ranks) if isinstance(error, SyncError) else []
        self.write("failure", _encode(Failure(kind, ranks, str(error)[:1000])).decode())
        _d(self._page, _WAITING, 0.0)

    # -------------------------------------------------------------------------------------------- watcher

    def put(self, field: str, value: float) -> None:
        """Write one number."""
        struct.pack_into(f"={_FIELDS[field]}", self._page, _AT[field], value)

    def write(self, field: str, text: str) -> None:
        """Write one text, as much of it as there is room for."""
        at, room = _TEXTS[field]
        raw = text.encode(errors="replace")[: room - _LENGTH.size]
        self._page[at : at + _LENGTH.size + len(raw)] = _LENGTH.pack(len(raw)) + raw

    def show_groups(self, awaited: tuple[str, int, list[int]] | None, counts: Mapping[str, int]) -> None:
        """Write in which watched group this rank waits and for whom, and how far it is in each.

        What has no room is left out whole: then nothing is known.
        """
        for field, value in (("awaited", awaited), ("counts", dict(counts))):
            text = _encode(value).decode() if value else ""
            self.write(field, text if len(text) <= _TEXTS[field][1] - _LENGTH.size else "")

    def view(self, rank: int) -> ProgressView:
        """Return a reader of this page."""
        return ProgressView(rank, self._page)

    def close(self) -> None:
        """Close the page; the training thread may go on writing, and nobody reads it any more.

        (The page of a forked child's parent goes on, without the child.)
        """
        if self.fd < 0:
            return
        self._page = bytearray(self._page[:])  # swapped in one step: the training thread writes without a lock
        os.close(self.fd)
        self.fd = -1


class NoBoard:
    """Takes the place of a page where nobody watches."""

    def entered(self, size_bytes: int, op: int = 0) -> None:
        """Do nothing."""

    def waiting(self) -> None:
        """Do nothing."""

    def resumed(self) -> None:
        """Do nothing."""

    def failed(self, error: BaseException) -> None:
        """Do nothing."""


class ProgressView:
    """A reader of one rank's page.

    Args:
        rank: Whose.
        page: The page.
    """

    def __init__(self, rank: int, page: Any) -> None:
        self.rank = rank
        self._page = page

    @classmethod
    def of_process(cls, rank: int, pid: int, fd: int) -> ProgressView:
        """Map the page of another process of this host.

        Raises:
            OSError: It is gone, or another user's.
        """
        own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
        try:
            return cls(rank, mmap.mmap(own, PAGE_BYTES, prot=mmap.PROT_READ))
        except ValueError as error:  # another file has this number by now
            raise OSError(f"rank {rank} has no page there: {error}") from None
        finally:
            os.close(own)

    def number(self, field: str) -> float:
        """Return one number."""
        value: float = struct.unpack_from(f"={_FIELDS[field]}", self._page, _AT[field])[0]
        return value

    def text(self, field: str) -> str:
        """Return one text."""
        at, room = _TEXTS[field]
        length = min(_LENGTH.unpack_from(self._page, at)[0], room - _LENGTH.size)
        return bytes(self._page[at + _LENGTH.size : at + _LENGTH.size + length]).decode(errors="replace")

    def standing(self, now: float) -> RankState:
        """Return where the rank stands.

        Args:
            now: Monotonic seconds; all processes of a host share that clock.
        """
        head = dict(zip(_FIELDS, _HEAD.unpack_from(self._page), strict=True))
        waiting = head["waiting_since"] or head["call_since"]
        calls = []
        for seq in range(max(head["entered"] - _NEWEST, 0) + 1, head["entered"] + 1):
            number, size_bytes, op = _CALL.unpack_from(self._page, _CALLS_AT + seq % CALLS_KEPT * 24)
            if number == seq:  # else it is being overwritten
                calls.append(WaitingCall(seq, OPS[op % len(OPS)], size_bytes))
        failure, text = None, self.text("failure")
        with contextlib.suppress(*UNDECODABLE):  # it may be half written
            failure = _decode_failure(text) if text else None
        call = "" if head["waiting_since"] or not head["call_since"] else self.text("call")
        group, number, ranks = "", 0, list[int]()
        counts: dict[str, int] = {}
        with contextlib.suppress(*UNDECODABLE):
            counts = _decode_counts(text) if (text := self.text("counts")) else counts
            if call and (text := self.text("awaited")):
                group, number, ranks = _decode_awaited(text)
        return RankState(
            rank=self.rank,
            **{field: head[field] for field in ("step", "entered", "synced", "longest_s", "group_seq")},
            waiting_s=max(now - waiting, 1e-9) if waiting else 0.0,
            still_s=max(now - max(head["moved_at"], head["group_moved_at"]), 0.0),
            calls=calls,
            call=call,
            call_bytes=head["call_bytes"] if call else 0,
            group=group,
            group_number=number,
            group_ranks=ranks,
            group_counts=counts,
            where=self.text("where"),
            silent_s=max(now - head["beat_at"], 0.0),
            left=bool(head["left"]),
            failure=failure,
        )

    def close(self) -> None:
        """Unmap the page of another process."""
        if isinstance(self._page, mmap.mmap):
            self._page.close()

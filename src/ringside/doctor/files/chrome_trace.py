"""Chrome traces of any size, a few megabytes at a time: cut at the border of two events, decoded in batches.

Nothing but the batch at hand is kept, so memory does not grow with the file. A file that breaks off, or holds events
that are no JSON, gives everything else and says what was lost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec

from ringside.decoding import UNDECODABLE

BLOCK_BYTES = 4 << 20
MOST_HEADER_BYTES = 64 << 20
LARGE_EVENT_BYTES = 1 << 20
TRIES = 24
"""How many borders are tried before a batch is taken apart event by event."""

T = TypeVar("T")
_BORDER = re.compile(rb"\}\s*,\s*(?=\{)")
_EVENT_BORDER = re.compile(rb'\}\s*,\s*(?=\{\s*"(?:ph|cat|name|ts|args|pid|tid|bp)"\s*:)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_EMPTY = re.compile(rb"\s*(?:,\s*)?\]")
_END = re.compile(rb"\}\s*(?:,\s*)?\]\s*(?=[,}]|\Z)")


@dataclass
class Scan(Generic[T]):
    """Reads one trace.

    Args:
        stream: Its bytes, unpacked.
        kind: What an event is decoded to, a `msgspec.Struct`.

    Attributes:
        header: What stands beside the events (`distributedInfo`, `baseTimeNanoseconds`, ...); complete at the end.
        events: Events read.
        damaged: Events that were no JSON, or not of the form of an event.
        whole: Whether the list of events was closed; otherwise the file breaks off.
        bytes_read: Bytes seen, unpacked.
    """

    stream: BinaryIO
    kind: type[T]
    header: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    damaged: int = 0
    whole: bool = False
    bytes_read: int = 0
    _rest: bytes = b""
    _over: bool = False

    def __post_init__(self) -> None:
        self._many: Callable[[bytes], list[T]] = msgspec.json.Decoder(list[self.kind], strict=False).decode  # type: ignore[name-defined]

    def batches(self) -> Iterator[list[T]]:
        """Yield the events, some tens of thousands at a time."""
        if not self._find_events():
            return
        while not self.whole:
            self._more()
            batch = self._batch()
            if batch:
                self.events += len(batch)
                yield batch
            elif self._over:
                break
        if self.whole:
            self._read_tail()

    def losses(self) -> str:
        """Return in one line what is lost of the file; empty where it is whole."""
        lost = []
        if self.damaged:
            lost.append(f"{self.damaged} events are damaged and were left out")
        if not self.whole:
            lost.append(f"the JSON breaks off after {self.events} whole events; what came after is lost")
        return "; ".join(lost)

    def _more(self) -> bool:
        block = self.stream.read(BLOCK_BYTES)
        self.bytes_read += len(block)
        self._rest += block
        self._over = not block
        return bool(block)

    def _find_events(self) -> bool:
        """Read up to the first event; what stands before it is the header."""
        while len(self._rest) < MOST_HEADER_BYTES:
            grown = self._more()
            start = self._rest.lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:1] == b"[":
                self._rest = start[1:]
                return True
            if match := _EVENTS.search(self._rest):
                self._take_header(self._rest[: match.start()].rstrip().rstrip(b",") + b"}")
                self._rest = self._rest[match.end() :]
                return True
            if not grown:
                return False
        return False

    def _take_header(self, text: bytes) -> None:
        try:
            self.header.update(msgspec.json.decode(text, type=dict[str, Any]))
        except UNDECODABLE:
            self._take_fields(text)

    def _take_fields(self, text: bytes) -> None:
        """What matters of a header that is no JSON as a whole."""
        for name in (b"distributedInfo", b"baseTimeNanoseconds", b"host_name"):
            for match in re.finditer(rb'"' + name + rb'"\s*:\s*(\{[^{}]*\}|\d+|"[^"]*")', text):
                try:
                    self.header[name.decode()] = msgspec.json.decode(match[1])
                except UNDECODABLE:
                    continue

    def _batch(self) -> list[T]:
        """Decode as many whole events as there are; what follows stays for the next batch."""
        data = self._rest
        for cut in self._cuts(data):
            batch = self._decode(data[: cut[0]])
            if batch is not None:
                self._rest, self.whole = data[cut[1] :], cut[2]
                return batch
        if not self._over and len(data) < max(4 * BLOCK_BYTES, LARGE_EVENT_BYTES):
            return []
        return self._salvage(data)

    def _cuts(self, data: bytes) -> Iterator[tuple[int, int, bool]]:
        """Places where a list of events may end: (end of it, where to go on, whether it was the last)."""
        end = len(data)
        for _ in range(TRIES):
            brace = data.rfind(b"}", 0, end)
            if brace < 0:
                break
            if match := _BORDER.match(data, brace):
                yield brace + 1, match.end(), False
            end = brace
        yield from self._ends(data)

    def _ends(self, data: bytes) -> Iterator[tuple[int, int, bool]]:
        """Places where the list of all events may be closed: a bracket behind an event (or behind none)."""
        if match := _EMPTY.match(data):
            yield 0, match.end(), True
        for match in islice(_END.finditer(data), 40 * TRIES):
            yield match.start() + 1, match.end(), True

    def _decode(self, events: bytes) -> list[T] | None:
        try:
            return self._many(b"[" + events + b"]")
        except UNDECODABLE:
            return None

    def _salvage(self, data: bytes) -> list[T]:
        """Take data apart at everything that looks like a border; keep what is an event, count what is not."""
        pieces, start = [], 0
        for match in _EVENT_BORDER.finditer(data):
            pieces.append(data[start : match.start() + 1])
            start = match.end()
        found: list[T] = []
        self._halve(pieces, found)
        self._rest = data[start:]
        if self._over:
            found += self._last(self._rest)
        elif not pieces:
            self._rest = b""
            self.damaged += 1
        return found

    def _last(self, data: bytes) -> list[T]:
        """The last event of all, and the end of their list where it is there; what breaks off is lost."""
        self._rest = b""
        for match in islice(_END.finditer(data), TRIES):
            batch = self._decode(data[: match.start() + 1])
            if batch is not None:
                self._rest, self.whole = data[match.end() :], True
                return batch
        return self._decode(data) or []

    def _halve(self, pieces: list[bytes], found: list[T]) -> None:
        if not pieces:
            return
        batch = self._decode(b",".join(pieces))
        if batch is not None:
            found += batch
        elif len(pieces) == 1:
            self.damaged += 1
        else:
            self._halve(pieces[: len(pieces) // 2], found)
            self._halve(pieces[len(pieces) // 2 :], found)

    def _read_tail(self) -> None:
        """What stands behind the events belongs to the header as well."""
        while len(self._rest) < MOST_HEADER_BYTES and self._more():
            pass
        text = self._rest.strip().lstrip(b",").strip()
        if text and text != b"}":
            self._take_header(b"{" + text)

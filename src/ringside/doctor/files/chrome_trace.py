"""Chrome traces of any size, a few megabytes at a time: cut at the border of two events, decoded in batches.

Nothing but the batch at hand is kept, so memory does not grow with the file. A file that breaks off, or holds events
that are no JSON, gives everything else, and `losses` names what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    """

    stream: BinaryIO
    kind: type[T]
    header: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    damaged: int = 0
    whole: bool = False
    _rest: bytes = b""
    _at_end: bool = False

    def __post_init__(self) -> None:
        self._many: Callable[[bytes], list[T]] = msgspec.json.Decoder(list[self.kind], strict=False).decode  # type: ignore[name-defined]

    def batches(self) -> Iterator[list[T]]:
        """Yield the events, some tens of thousands at a time."""
        if not self._find_events():
            return
        while not self.whole:
            self._read_block()
            batch = self._next_batch()
            if batch:
                self.events += len(batch)
                yield batch
            elif self._at_end:
                break
        if self.whole:
            # What stands behind the events belongs to the header as well.
            while len(self._rest) < MOST_HEADER_BYTES and self._read_block():
                pass
            text = self._rest.strip().lstrip(b",").strip()
            if text and text != b"}":
                self._add_header(b"{" + text)

    def losses(self) -> str:
        """Return in one line what is lost of the file; empty where it is whole."""
        lost = []
        if self.damaged:
            lost.append(f"{self.damaged} events are damaged and were left out")
        if not self.whole:
            lost.append(f"the JSON breaks off after {self.events} whole events; what came after is lost")
        return "; ".join(lost)

    def _read_block(self) -> bool:
        block = self.stream.read(BLOCK_BYTES)
        self._rest += block
        self._at_end = not block
        return bool(block)

    def _find_events(self) -> bool:
        """Read up to the first event; what stands before it is the header."""
        while len(self._rest) < MOST_HEADER_BYTES:
            grown = self._read_block()
            start = self._rest.lstrip(b"\xef\xbb\xbf \t\r\n")
            if start[:1] == b"[":
                self._rest = start[1:]
                return True
            if match := _EVENTS.search(self._rest):
                self._add_header(self._rest[: match.start()].rstrip().rstrip(b",") + b"}")
                self._rest = self._rest[match.end() :]
                return True
            if not grown:
                return False
        return False

    def _add_header(self, text: bytes) -> None:
        try:
            self.header.update(msgspec.json.decode(text, type=dict[str, Any]))
        except UNDECODABLE:
            # no JSON as a whole: the fields that matter, one by one
            for name in (b"distributedInfo", b"baseTimeNanoseconds", b"host_name"):
                for match in re.finditer(rb'"' + name + rb'"\s*:\s*(\{[^{}]*\}|\d+|"[^"]*")', text):
                    with suppress(*UNDECODABLE):
                        self.header[name.decode()] = msgspec.json.decode(match[1])

    def _next_batch(self) -> list[T]:
        """Decode as many whole events as there are; what follows stays for the next batch."""
        data = self._rest
        for cut in self._cuts(data):
            batch = self._decode(data[: cut[0]])
            if batch is not None:
                self._rest, self.whole = data[cut[1] :], cut[2]
                return batch
        # no whole event yet: read more, but no more than any event is large
        if not self._at_end and len(data) < max(4 * BLOCK_BYTES, LARGE_EVENT_BYTES):
            return []
        # Take the data apart at everything that looks like a border; keep what is an event, count what is not.
        pieces, start = [], 0
        for match in _EVENT_BORDER.finditer(data):
            pieces.append(data[start : match.start() + 1])
            start = match.end()
        found = self._halve(pieces)
        self._rest = data[start:]
        if self._at_end:
            # The last event of all, and the end of their list where it is there; what breaks off is lost.
            last, self._rest = self._rest, b""
            for match in islice(_END.finditer(last), TRIES):
                events = self._decode(last[: match.start() + 1])
                if events is not None:
                    self._rest, self.whole = last[match.end() :], True
                    return found + events
            found += self._decode(last) or []
        elif not pieces:
            self._rest = b""
            self.damaged += 1
        return found

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
        # The list of all events may be closed in here: a bracket behind an event (or behind none).
        if closed := _EMPTY.match(data):
            yield 0, closed.end(), True
        for closed in islice(_END.finditer(data), 40 * TRIES):
            yield closed.start() + 1, closed.end(), True

    def _decode(self, events: bytes) -> list[T] | None:
        try:
            return self._many(b"[" + events + b"]")
        except UNDECODABLE:
            return None

    def _halve(self, pieces: list[bytes]) -> list[T]:
        """Decode events, all that are whole: where one is damaged, each half of them by itself."""
        batch = self._decode(b",".join(pieces))
        if batch is not None:
            return batch
        if len(pieces) == 1:
            self.damaged += 1
            return []
        half = len(pieces) // 2
        return [*self._halve(pieces[:half]), *self._halve(pieces[half:])]

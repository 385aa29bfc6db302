"""Calls of many ranks, whoever recorded them, in columns: millions of them are held in 24 bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, BinaryIO, NamedTuple, TypeVar

import msgspec

from ringside.decoding import MOST_RANKS, UNDECODABLE

BLOCK_BYTES = 256 << 10
"""So few that they and what is decoded of them stay in a processor's cache."""
MOST_LINE_BYTES = 4 << 20
MOST_STREAMS = 1 << 17
MOST_LINKS = 1 << 17
UNKNOWN = float("nan")

T = TypeVar("T")
Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Larger numbers are damage, and no column holds them."""


class Stream:
    """Calls of one function that one rank made in one communicator.

    Attributes:
        seq: Their numbers, as the communicator counts this function.
        start_s: When each began on the rank's device, by its host's clock; NaN where it is not recorded.
        took_s: How long it ran.
    """

    __slots__ = ("seq", "start_s", "took_s")

    def __init__(self) -> None:
        self.seq, self.start_s, self.took_s = array("q"), array("d"), array("d")

    def __len__(self) -> int:
        """How many calls."""
        return len(self.seq)

    def add(self, seq: int, start_s: float, took_s: float) -> None:
        """Note one call."""
        self.seq.append(seq)
        self.start_s.append(start_s)
        self.took_s.append(took_s)

    def extend(self, seq: Iterable[int], start_s: Iterable[float], took_s: Iterable[float]) -> None:
        """Note calls, of each as many."""
        self.seq.extend(seq)
        self.start_s.extend(start_s)
        self.took_s.extend(took_s)


class Link(NamedTuple):
    """From one rank of a communicator to another."""

    communicator: str
    src: int
    dst: int


@dataclass
class LinkTime:
    """What the messages of one link waited for, as its sender saw it; seconds.

    Attributes:
        nbytes: Bytes sent.
        gpu_s: The sender's own device had nothing to send yet.
        peer_s: The receiver had no room.
        wire_s: They were on the wire.
    """

    nbytes: int = 0
    gpu_s: float = 0.0
    peer_s: float = 0.0
    wire_s: float = 0.0


@dataclass
class Calls:
    """Everything that the files of one kind recorded.

    Attributes:
        streams: The calls, by communicator, function and rank of the communicator.
        sizes: Ranks of each communicator; where it is not recorded, one more than the highest rank seen.
        sized: The communicators whose size is recorded.
        members: The process of each rank of a communicator, as (its clock, its name): ranks of one clock are of one
            host.
        links: What messages waited for.
        dropped: Calls that the recorder says that it lost, by communicator and rank.
        written_s: The first and the last moment at which something was written.
    """

    streams: dict[tuple[str, str, int], Stream] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    sized: set[str] = field(default_factory=set)
    members: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)
    links: dict[Link, LinkTime] = field(default_factory=dict)
    dropped: dict[tuple[str, int], int] = field(default_factory=dict)
    written_s: tuple[float, float] | None = None

    def join(self, communicator: str, rank: int, ranks: int, process: tuple[str, str]) -> None:
        """Note that a process is that rank of a communicator."""
        if len(self.members) < MOST_STREAMS:
            self.members[communicator, rank] = process
            self.sizes[communicator] = max(self.sizes.get(communicator, 0), ranks, rank + 1)
            if ranks:
                self.sized.add(communicator)

    def stream(self, communicator: str, function: str, rank: int) -> Stream:
        """Return where such calls are noted; nowhere that is kept beyond `MOST_STREAMS` (no job has so many)."""
        found = self.streams.get((communicator, function, rank))
        if found is None:
            found = Stream()
            if len(self.streams) < MOST_STREAMS:
                self.streams[communicator, function, rank] = found
        return found

    def link(self, link: Link) -> LinkTime:
        """Return where a link's times are summed; likewise."""
        found = self.links.get(link)
        if found is None:
            found = LinkTime()
            if len(self.links) < MOST_LINKS:
                self.links[link] = found
        return found

    def wrote(self, moment_s: float) -> None:
        """Note a moment at which something was written."""
        first, last = self.written_s or (moment_s, moment_s)
        self.written_s = min(first, moment_s), max(last, moment_s)


def line_batches(stream: BinaryIO) -> Iterator[bytes]:
    """Yield whole lines, hundreds at a time; a line of some megabytes comes in pieces, which nobody decodes."""
    while block := stream.read(BLOCK_BYTES):
        yield block + stream.readline(MOST_LINE_BYTES)


def decoded(batch: bytes, decoder: msgspec.json.Decoder[T]) -> tuple[list[T], int]:
    """Return what the lines of a batch hold, and how many were left out because they hold nothing of the kind."""
    try:
        return decoder.decode_lines(batch), 0
    except UNDECODABLE:
        found, damaged = [], 0
        for line in batch.splitlines():
            try:
                found.append(decoder.decode(line))
            except UNDECODABLE:
                damaged += bool(line.strip())
        return found, damaged

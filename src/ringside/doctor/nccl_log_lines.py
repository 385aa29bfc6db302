"""NCCL's lines in any log, whatever stands around them and however many ranks write into one file.

The prefix `host:pid:tid [device] NCCL INFO` has been the same from 2.4 to 2.28; launchers put their own in front
(`[1,0]<stdout>:`, a timestamp, a Ray actor's name), and ranks that share a file now and then share a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

PREFIX = re.compile(
    r"(?P<host>[A-Za-z0-9_<][\w.\-<>]*):(?P<pid>\d+):(?P<tid>\d+) \[(?P<device>-?\d+)\] "
    r"(?:(?P<where>[\w./\-]+:\d+) )?NCCL (?P<level>INFO|WARN|ERROR|TRACE) "
)
BARE_VERSION = re.compile(r"^(?:\S+ )?NCCL version (\d+\.\d+[\w.+]*)")
MOST_LINE = 100_000


@dataclass(frozen=True)
class Line:
    """One message of one thread.

    Args:
        host: The host name NCCL printed.
        pid: Process.
        tid: Thread.
        device: CUDA device, -1 where there is none.
        level: `INFO`, `WARN`, ...
        text: The message.
        number: Line of the file, from 1.
    """

    host: str
    pid: int
    tid: int
    device: int
    level: str
    text: str
    number: int

    @property
    def process(self) -> tuple[str, int]:
        """Host and process: one rank of each communicator."""
        return self.host, self.pid


def nccl_lines(text: str, number: int, hosts: set[str]) -> Iterator[Line]:
    """Yield the messages in one line of a log; several where ranks wrote into each other's line.

    Args:
        text: The line.
        number: Its number.
        hosts: Hosts seen so far; those of this line are added. They tell where a message ends that another one's
            host name follows without a space.
    """
    found = list(PREFIX.finditer(text))
    for index, match in enumerate(found):
        glued = match.start() > 0 and text[match.start() - 1].isalnum()
        host = _host(match["host"], hosts if index or glued else set())
        hosts.add(host)
        end = _end(found[index + 1], hosts) if index + 1 < len(found) else len(text)
        yield Line(
            host=host,
            pid=int(match["pid"]),
            tid=int(match["tid"]),
            device=int(match["device"]),
            level=match["level"],
            text=text[match.end() : end].strip(),
            number=number,
        )


def _host(text: str, hosts: set[str]) -> str:
    """Drop what touches a host name: a launcher's `<stdout>:`, or the end of another rank's message."""
    text = text.rpartition(">")[2] or text
    if text in hosts:
        return text
    return max((host for host in hosts if text.endswith(host)), key=len, default=text)


def _end(following: re.Match[str], hosts: set[str]) -> int:
    """Where a message ends that another one follows."""
    return following.end("host") - len(_host(following["host"], hosts))


def text_lines(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a stream of bytes; carriage returns of progress bars end a line too."""
    number = 0
    while raw := stream.readline(MOST_LINE):
        number += 1
        for piece in raw.replace(b"\r", b"\n").split(b"\n"):
            if piece:
                yield number, piece.decode("utf-8", "replace")

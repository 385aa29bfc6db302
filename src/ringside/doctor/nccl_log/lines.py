"""NCCL's lines in any log, whatever stands around them and however many ranks write into one file.

The prefix `host:pid:tid [device] NCCL INFO` has been the same from 2.4 to 2.28; launchers put their own in front
(`[1,0]<stdout>:`, a timestamp, a Ray actor's name), and ranks that share a file now and then share a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import BinaryIO

_PREFIX_REVERSED = re.compile(
    r" (?P<level>OFNI|NRAW|RORRE|ECART) LCCN (?:\d+:[\w./\-]+ )?"
    r"\](?P<device>\d{1,9}-?)\[ (?P<tid>\d{1,18}):(?P<pid>\d{1,18}):(?P<host>[\w.\-<>]*[A-Za-z0-9_<])"
)
"""The prefix from its end: its last words are rare, while a search for a host would begin anew at every letter."""
MOST_HOST = 255
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
        hosts: Hosts seen so far; those of this line are added. They show where a message ends that another one's
            host name follows without a space.
    """
    # A message lasts until the next prefix: offsets from the front are the length less those in the reversed text.
    found = list(_PREFIX_REVERSED.finditer(text[::-1]))[::-1]
    for index, match in enumerate(found):
        begin = len(text) - match.end()
        glued = begin > 0 and text[begin - 1].isalnum()
        host = _host(_group(match, "host"), hosts if index or glued else set())
        hosts.add(host)
        end = len(text)
        if index + 1 < len(found):
            following = found[index + 1]
            end -= following.start("host") + len(_host(_group(following, "host"), hosts))
        yield Line(
            host=host,
            pid=int(_group(match, "pid")),
            tid=int(_group(match, "tid")),
            device=int(_group(match, "device")),
            level=_group(match, "level"),
            text=text[len(text) - match.start() : end].strip(),
            number=number,
        )


def _group(match: re.Match[str], name: str) -> str:
    """A group of the reversed prefix, the right way round."""
    return match[name][::-1]


def _host(text: str, hosts: set[str]) -> str:
    """Drop what touches a host name: a launcher's `<stdout>:`, or the end of another rank's message."""
    text = text.rpartition(">")[2] or text
    if text in hosts:
        return text
    ends = (text[start:] for start in range(max(len(text) - MOST_HOST, 0), len(text)))
    return next((end for end in ends if end in hosts), text)


def text_lines(stream: BinaryIO) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines of a stream of bytes; carriage returns of progress bars end a line too."""
    for number, raw in enumerate(iter(partial(stream.readline, MOST_LINE), b""), 1):
        for piece in raw.replace(b"\r", b"\n").split(b"\n"):
            if piece:
                yield number, piece.decode("utf-8", "replace")

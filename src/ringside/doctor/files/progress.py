"""How far the doctor is, for the person who waits for it."""

from __future__ import annotations

import time
from typing import TextIO

from ringside.text import size

EVERY_SECONDS = 0.5
EVERY_SECONDS_IN_A_LOG = 5.0


class Progress:
    """Receives what is being done, in methods cheap enough to be called for every block. This one shows nothing."""

    def begin(self, text: str) -> None:
        """Record what begins now, such as `reading 8 Kineto traces`."""

    def advance(self, nbytes: int) -> None:
        """Record that `nbytes` more bytes, as they lie on disk, have been read."""


class OnStream(Progress):
    """Writes progress to a stream: one line that is overwritten on a terminal, a line now and then in a log.

    Args:
        stream: Where to, normally stderr.
        terminal: Whether a line can be overwritten there.
    """

    def __init__(self, stream: TextIO, *, terminal: bool) -> None:
        self._stream, self._terminal = stream, terminal
        self._every_s = EVERY_SECONDS if terminal else EVERY_SECONDS_IN_A_LOG
        self._text, self._bytes, self._shown = "", 0, time.monotonic()
        self._width = 0

    def begin(self, text: str) -> None:
        """Note what begins now; show it where it can be overwritten."""
        self._text = text
        self._show()

    def advance(self, nbytes: int) -> None:
        """Count bytes; show the sum now and then."""
        self._bytes += nbytes
        self._show()

    def done(self) -> None:
        """Wipe the line."""
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown < self._every_s:
            return
        self._shown = now
        line = f"{self._text} · {size(self._bytes)} read"[:110]
        self._stream.write(f"{line.ljust(self._width)}\r" if self._terminal else f"{line}\n")
        self._stream.flush()
        self._width = max(self._width, len(line))

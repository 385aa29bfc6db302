"""Text from elsewhere (names of hosts and runs, causes) made fit for a terminal, and for one without UTF-8."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

REPLACEMENT = "�"
_CONTROLS = dict.fromkeys({*range(32), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}, REPLACEMENT)
ERRORS = "ringside.plain"
"""What a stream is told to do with text that its encoding does not have."""

_PLAIN = str.maketrans("▁▂▃▄▅▆▇█●○◀▶▌→–−µ×…·━↑↓⏎‖°", "_.,-~=*#*o<>>>--ux~--^v== ")


def printable(text: str) -> str:
    """Return text without anything a terminal would act upon: control and format characters, lone surrogates.

    Each becomes one replacement character, so that one sees that there was something.
    """
    return text if text.isprintable() else "".join(one if one.isprintable() else REPLACEMENT for one in text)


def printable_lines(text: str) -> str:
    """Return text of many lines, such as a page, with every line as `printable` returns it; tabs stay."""
    return text if text.isprintable() else re.sub(r"[^\n\t]+", lambda found: printable(found[0]), text)


def without_controls(page: str) -> str:
    """Return a page in HTML without control characters, which mean nothing there and much where somebody prints it."""
    return page.translate(_CONTROLS)


class SafeConsole(Console):
    """A console that writes text as `printable` returns it, line by line: only its own colours reach the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what a renderable looks like; what moves the cursor comes from rich alone."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(printable, segment.text.split("\n"))), segment.style)


class WithoutTrailingBlanks:
    """What a renderable looks like, without the blanks that fill its lines: it is copied into tickets.

    Args:
        shown: The renderable.
    """

    def __init__(self, shown: RenderableType) -> None:
        self._shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Yield its lines, as rich asks for them."""
        for line in console.render_lines(self._shown, options, pad=False):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
            yield from [*line, Segment.line()]


def in_ascii(text: str) -> str:
    """Return text of the same length in ASCII, for terminals without UTF-8: drawings keep their meaning."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")


def fit(text: Text, utf8: bool) -> Text:
    """Return a text as it is, or in ASCII with the same styles."""
    if utf8:
        return text
    plain = text.copy()
    plain.plain = in_ascii(text.plain)
    return plain


def speaks_utf8(encoding: str | None) -> bool:
    """Whether an encoding, as streams name theirs, is UTF-8."""
    return (encoding or "").lower().replace("-", "").replace("_", "") in ("utf8", "utf8sig")


def never_raises(stream: TextIO) -> None:
    """Have a stream write whatever it is given: in ASCII what its encoding lacks, as it was what came from no text."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=ERRORS)


def _instead(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):  # somebody reads the same stream
        return codecs.replace_errors(error)
    one = error.object[error.start]
    if "\udc80" <= one <= "\udcff":  # a byte of a path, see PEP 383
        return bytes([ord(one) - 0xDC00]), error.start + 1
    return in_ascii(one), error.start + 1


codecs.register_error(ERRORS, _instead)

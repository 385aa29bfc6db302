"""Text from elsewhere (names of hosts and runs, causes) made fit for a terminal, and for one without UTF-8."""

from __future__ import annotations

from rich.text import Text

REPLACEMENT = "�"

_PLAIN = str.maketrans("▁▂▃▄▅▆▇█●○◀▶▌→–−µ×…·━↑↓⏎‖°", "_.,-~=*#*o<>>>--ux~--^v== ")


def printable(text: str) -> str:
    """Return text without anything a terminal would act upon: control and format characters, lone surrogates.

    Each becomes one replacement character, so that one sees that there was something.
    """
    return text if text.isprintable() else "".join(one if one.isprintable() else REPLACEMENT for one in text)


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

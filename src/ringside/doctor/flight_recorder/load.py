"""A flight-recorder dump's bytes as plain values: JSON, or a pickle of which every global is refused.

A dump is untrusted input. PyTorch writes nothing but dictionaries, lists, text and numbers, so a pickle that asks for
anything else is no dump, whatever else it may be.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ringside.errors import RingsideError

SPARE_BYTES = 2 << 30
"""Memory that unpickling may claim beyond what the process has; a memo index of 2^31 would claim 32 GB."""

_ENTRIES = re.compile(r'"entries"\s*:\s*\[\s*')
_BETWEEN = re.compile(r"[\s,]*")
_decode = json.JSONDecoder().raw_decode
# Half of a UTF-16 pair, in UTF-8 or escaped: Python takes it for text that it can neither print nor encode.
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]|\\[uU][0-9a-fA-F]*[dD][89a-fA-F]")
LOST = "lost"
"""Key under which `whole_part` describes what is lost."""

_OLD_PICKLE = re.compile(
    rb"\A(?:[(]?[ci][\w.]+\n[\w.]+\n|[(][dl](?:p\d|q)|[\]}](?:p\d|q)|[\]}][.]\Z)",
)
"""How pickles of the protocols 0 and 1 begin: a global, a dictionary or a list."""


class NotADumpError(RingsideError):
    """The bytes are no flight-recorder dump; the message names what they are instead."""


class _Refusing(pickle.Unpickler):
    """Builds dictionaries, lists, tuples, text and numbers; calls nothing."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotADumpError(f"refused: a pickle that asks for {module}.{name}, which no dump does; none of it was run")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise NotADumpError("refused: a pickle that refers to objects outside of itself")


def is_pickle(head: bytes) -> bool:
    """Return whether bytes begin like a pickle, of the binary protocols or of the old ones in text."""
    return (head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 2) or bool(_OLD_PICKLE.match(head))


def load_dump(data: bytes) -> Any:
    """Return the plain values that a dump's bytes hold; nothing in them is ever called.

    Raises:
        NotADumpError: The bytes are broken, or ask for code.
    """
    if data[:1] in (b"{", b" ", b"\n"):
        try:
            return msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return whole_part(data, str(error))
    try:
        with _bounded_memory(SPARE_BYTES + 64 * len(data)):
            content = _Refusing(io.BytesIO(data), encoding="utf-8", errors="replace").load()
            return _printable(content, {}) if _SURROGATE.search(data) else content
    except NotADumpError:
        raise
    except MemoryError:
        raise NotADumpError("refused: a pickle that asks for more memory than its size explains") from None
    except Exception as error:  # a hostile pickle may raise anything at all
        raise NotADumpError(f"its pickle breaks off or is damaged ({type(error).__name__}: {error})") from None


def _printable(value: Any, known: dict[int, Any]) -> Any:
    """Return plain values with "?" in place of lone surrogates; `known`: what became of the containers seen so far."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if not isinstance(value, list | tuple | dict) or id(value) in known:
        return known.get(id(value), value)
    # containers are entered before they are filled: a pickle may hold itself
    if isinstance(value, dict):
        known[id(value)] = found = {}
        found.update({_printable(key, known): _printable(item, known) for key, item in value.items()})
        return found
    several: list[Any] = []
    known[id(value)] = several
    several.extend(_printable(item, known) for item in value)
    if isinstance(value, tuple):  # later places that hold the same one get a tuple, too
        known[id(value)] = tuple(several)
    return known[id(value)]


def whole_part(data: bytes, why: str) -> dict[str, Any]:
    """Return what is whole of a dump in JSON that breaks off: everything before its entries, and whole entries.

    Args:
        data: The bytes.
        why: What is wrong with them.

    Returns:
        The dump, with `LOST` saying what of it is lost.

    Raises:
        NotADumpError: No entry is whole.
    """
    text = data.decode("utf-8", "replace")
    begin = _ENTRIES.search(text)
    entries: list[Any] = []
    offset = begin.end() if begin else len(text)
    with contextlib.suppress(ValueError, RecursionError):
        while True:
            entry, offset = _decode(text, offset)
            entries.append(_printable(entry, {}))
            offset = _BETWEEN.match(text, offset).end()  # type: ignore[union-attr]
    if begin is None or not entries:
        raise NotADumpError(f"its JSON breaks off or is damaged ({why})")
    lost = f"its JSON breaks off after {len(entries)} whole calls; those after them, the newest, are lost"
    # What stands before the entries; nothing where that is no JSON either.
    try:
        before = msgspec.json.decode(text[: begin.start()].rstrip().rstrip(",") + "}")
    except (msgspec.DecodeError, RecursionError):
        before = {}
    return {**(before if isinstance(before, dict) else {}), "entries": entries, LOST: lost}


@contextlib.contextmanager
def _bounded_memory(spare_bytes: int) -> Iterator[None]:
    """Let this process grow by no more than so many bytes for the moment, where the system shows how large it is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        yield
        return
    limit = pages * resource.getpagesize() + spare_bytes
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

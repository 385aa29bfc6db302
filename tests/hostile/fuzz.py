"""Damage to real files: bytes, lines, numbers in text and whole structures; all of it from a seed.

`damaged(content, random)` finds out what a content is (packed, an archive, a pickle, JSON, MessagePack, text), takes it
apart where it can, changes some of it, and puts it together again.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pickle
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

MANY = 20_000
"""How often something is repeated: what grows with the square of it takes minutes and is found."""
DEEP = 2_000
MOST_BYTES = 4 << 20
"""A damaged file is cut there: all that is read of it in time is a question of how, not of how much."""

TEXTS = (
    "",
    "\0",
    "\x1b[2J\x1b]0;title\x07",
    "\u202egnp.exe\u2066",
    "\ud800",
    "a\r\nb\x85\u2028c",
    "<script>alert(1)</script>",
    "[bold red]x[/]",
    "../../../etc/passwd",
    "9" * 5_000,
    "-1",
    "1e400",
    "NaN",
    "{}%s{0}",
    "NCCL INFO " * 2_000,
    "A" * 100_000,
    "٣",
)
NUMBERS: tuple[int | float, ...] = (
    *(0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30, 10**400, 100_000, 3_000),
    *(0.0, -0.0, 1e-320, 1e308, -1e308, math.nan, math.inf, -math.inf, 0.5),
)
SPELLED = (
    *("", "0", "-0", "-1", "1e400", "-1e400", "1e-400", "nan", "inf", "-inf", "0x10", "1_000", "١٢", "9" * 30),
    *("9" * 5_000, "1e5", "2147483648", "9223372036854775808", "3000", "1,5", "1.2.3", "N/A", "null", "true", "[]"),
    "1e999999999999",
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def damaged(content: bytes, random: Random) -> bytes:
    """Return the content of a file with some damage done to it."""
    take_apart = (_gzip, _tar, _zip, _pickle, _json, _lines_of_json)
    if random.random() < 0.7:
        for one in take_apart:
            changed = one(content, random)
            if changed is not None:
                return changed[:MOST_BYTES]
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        content = random.choice(_BYTES)(content, random) if content else b"\0"
    return content[:MOST_BYTES]


# ------------------------------------------------------------------------------------------------- bytes and lines


def _flip(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content))
    return content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[at + 1 :]


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content))]


def _piece(content: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(content))
    return start, min(len(content), start + random.choice((1, 4, 16, 100, 512, 5_000)))


def _remove(content: bytes, random: Random) -> bytes:
    start, end = _piece(content, random)
    return content[:start] + content[end:]


def _duplicate(content: bytes, random: Random) -> bytes:
    start, end = _piece(content, random)
    times = random.choice((2, 2, 3, 1000)) if end - start < 200 else 2
    return content[:start] + content[start:end] * times + content[end:]


def _move(content: bytes, random: Random) -> bytes:
    start, end = _piece(content, random)
    piece, rest = content[start:end], content[:start] + content[end:]
    at = random.randrange(len(rest) + 1)
    return rest[:at] + piece + rest[at:]


def _blank(content: bytes, random: Random) -> bytes:
    start, end = _piece(content, random)
    return content[:start] + random.choice((b"\0", b"\xff", b" ")) * (end - start) + content[end:]


def _noise(content: bytes, random: Random) -> bytes:
    start, end = _piece(content, random)
    return content[:start] + random.randbytes(end - start) + content[end:]


def _insert(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    return content[:at] + random.choice(TEXTS).encode("utf-8", "surrogatepass") + content[at:]


def _number(content: bytes, random: Random) -> bytes:
    """Spell one number in the text, or one word in its place, in another way; in every tenth case all such numbers."""
    found = list(_NUMBER.finditer(content[: 1 << 20]))
    if not found:
        return _flip(content, random)
    match, new = random.choice(found), random.choice(SPELLED).encode()
    if random.random() < 0.1:
        return content.replace(match[0], new)
    return content[: match.start()] + new + content[match.end() :]


def _line(content: bytes, random: Random) -> bytes:
    lines = content.split(b"\n")
    a, b = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(5):
        case 0:
            lines[a], lines[b] = lines[b], lines[a]
        case 1:
            del lines[min(a, b) : max(a, b)]
        case 2:
            lines[a:a] = [lines[b]] * min(MANY, MOST_BYTES // (len(lines[b]) + 1))
        case 3:
            lines[a] += lines[b]
        case 4:
            words = re.split(rb"([\s,:=|\[\]]+)", lines[a])
            words[random.randrange(len(words))] = random.choice(TEXTS).encode("utf-8", "surrogatepass")
            lines[a] = b"".join(words)
    return b"\n".join(lines)


_BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(_flip, _flip, _truncate, _remove, _duplicate, _move, _blank, _noise, _insert, _number, _number, _number),
    *(_line, _line),
)


# ------------------------------------------------------------------------------------------------- what holds others


def _gzip(content: bytes, random: Random) -> bytes | None:
    if content[:2] != b"\x1f\x8b":
        return None
    try:
        inner = gzip.decompress(content)
    except (OSError, EOFError, zlib.error):
        return None
    return gzip.compress(damaged(inner, random), 1)


def _tar(content: bytes, random: Random) -> bytes | None:
    if content[257:262] != b"ustar":
        return None
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(content)) as old, tarfile.open(fileobj=made, mode="w") as new:
        members = [(member, old.extractfile(member)) for member in old.getmembers()]
        broken = random.randrange(len(members))
        for number, (member, file) in enumerate(members):
            inner = file.read() if file is not None else b""
            if number == broken and random.random() < 0.6:
                inner = damaged(inner, random)
            elif number == broken:
                member.name = random.choice((*TEXTS[1:], "x/" * 50 + "y", "/etc/x", member.name))[:200]
                member.type = random.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.REGTYPE))
                member.linkname = "/etc/passwd"
            member.size = len(inner)
            try:
                new.addfile(member, io.BytesIO(inner))
            except (ValueError, UnicodeError):
                continue
    packed = made.getvalue()
    if random.random() < 0.5:  # a header, in which a checksum that is right hides what is wrong
        at = 512 * random.randrange(len(packed) // 512)
        packed = packed[:at] + _header(packed[at : at + 512], random) + packed[at + 512 :]
    return packed


def _header(block: bytes, random: Random) -> bytes:
    """A block of a tar with one field of a header changed, and the checksum of that."""
    fields = ((100, 8), (124, 12), (136, 12), (156, 1), (257, 8), (329, 8), (345, 155), (0, 100))
    start, size = random.choice(fields)
    new = random.choice(
        (b"7" * size, b"\x80" + b"\xff" * (size - 1), b"\xff" * size, b"-1", b"\0", random.randbytes(size))
    )
    block = block[:start] + new[:size].ljust(size, b"\0") + block[start + size :]
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


def _zip(content: bytes, random: Random) -> bytes | None:
    if content[:4] != b"PK\x03\x04":
        return None
    made = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
            names = old.namelist()
            broken = random.choice(names)
            for name in names:
                inner = damaged(old.read(name), random) if name == broken else old.read(name)
                new.writestr(name if random.random() < 0.9 else random.choice(TEXTS[2:4]) + name, inner)
    except (zipfile.BadZipFile, ValueError, UnicodeError, zlib.error):
        return None
    return made.getvalue()


def _pickle(content: bytes, random: Random) -> bytes | None:
    if content[:1] != b"\x80" or len(content) < 2 or content[1] > 5:
        return None
    try:
        tree = pickle.loads(content)  # it is one of our own: whatever was damaged already is never damaged again
    except Exception:
        return None
    if random.random() < 0.05:
        tree = _somewhere(tree, random, lambda _: Bomb())
    try:
        return pickle.dumps(changed(tree, random), protocol=random.randrange(2, 6))
    except (RecursionError, ValueError, UnicodeError):
        return None


def _json(content: bytes, random: Random) -> bytes | None:
    if content.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return spelled(changed(tree, random), random)


def _lines_of_json(content: bytes, random: Random) -> bytes | None:
    lines = content.split(b"\n")
    at = random.randrange(len(lines))
    new = _json(lines[at], random)
    if new is None:
        return None
    return b"\n".join([*lines[:at], new, *lines[at + 1 :]])


def message(content: bytes, random: Random) -> bytes:
    """Return a damaged MessagePack."""
    try:
        tree = msgspec.msgpack.decode(content)
        if random.random() < 0.7:
            return msgspec.msgpack.encode(changed(tree, random))
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
        pass
    for _ in range(random.choice((1, 2, 8))):
        content = random.choice(_BYTES)(content, random) if content else b"\0"
    return content


class Bomb:
    """What would run if it were unpickled: `SIGN` in the environment is a file that must not be there afterwards."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ.get("RINGSIDE_FUZZ_SIGN", "/tmp/ringside-fuzz-sign"),)


# ------------------------------------------------------------------------------------------------- structures


def changed(tree: Any, random: Random) -> Any:
    """Return a copy of a structure of dicts, lists and plain values in which some places are changed."""
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        tree = _somewhere(tree, random, lambda value: _instead(value, random))
    return tree


def _somewhere(tree: Any, random: Random, change: Callable[[Any], Any], depth: int = 0) -> Any:
    """Walk down at random, every level with the same chance to be the last, and change what is there."""
    inner = isinstance(tree, dict | list | tuple) and len(tree) > 0
    if not inner or depth > 20 or random.random() < 0.12:
        return change(tree)
    if isinstance(tree, dict):
        key = random.choice(list(tree))
        return {**tree, key: _somewhere(tree[key], random, change, depth + 1)}
    at = random.randrange(len(tree))
    new = [*tree[:at], _somewhere(tree[at], random, change, depth + 1), *tree[at + 1 :]]
    return tuple(new) if isinstance(tree, tuple) else new


def _instead(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.7:
        return _other_dict(value, random)
    if isinstance(value, list) and value and random.random() < 0.7:
        return _other_list(value, random)
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.6:
        return random.choice((*NUMBERS, -value, value + 1, value * 1000))
    if isinstance(value, str) and random.random() < 0.6:
        return random.choice((*TEXTS, value + random.choice(TEXTS), value[: len(value) // 2], value * 3))
    return random.choice((None, True, [], {}, "", *NUMBERS, *TEXTS, [None], [[]], _nested(random), {"": {}}))


def _nested(random: Random) -> Any:
    deep: Any = []
    for _ in range(random.choice((10, 100, 400))):
        deep = [deep] if random.random() < 0.5 else {"x": deep}
    return deep


def _other_dict(value: dict[Any, Any], random: Random) -> Any:
    keys = list(value)
    key, other = random.choice(keys), random.choice(keys)
    match random.randrange(6):
        case 0:
            return {k: v for k, v in value.items() if k != key}
        case 1:
            return {**value, key: value[other]}
        case 2:
            return {(random.choice(TEXTS) if k == key else k): v for k, v in value.items()}
        case 3:
            return {**value, **{f"{key}{number}": value[key] for number in range(random.choice((3, 500)))}}
        case 4:
            return dict(reversed(value.items()))
        case _:
            return list(value.items())


def _other_list(value: list[Any], random: Random) -> Any:
    at = random.randrange(len(value))
    match random.randrange(6):
        case 0:
            return value[:at] + value[at + 1 :]
        case 1:
            return value[:at]
        case 2:
            return [*value[: at + 1], *[value[at]] * random.choice((1, 100, MANY)), *value[at + 1 :]]
        case 3:
            return value[::-1]
        case 4:
            return random.sample(value, len(value))
        case _:
            return {str(number): one for number, one in enumerate(value)}


def spelled(tree: Any, random: Random) -> bytes:
    """Return JSON as others may write it: with NaN, 1e400, repeated keys, lone surrogates, or far too deep."""
    text = json.dumps(tree, indent=random.choice((None, None, 1)))
    raw = text.encode("utf-8", "surrogatepass")
    match random.randrange(12):
        case 0:
            raw = raw.replace(b"{", b'{"rank": 7, "rank": -1, ', 1)
        case 1:
            raw = _NUMBER.sub(lambda found: random.choice(SPELLED[1:8]).encode(), raw, count=1)
        case 2:
            raw = json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")
        case 3:
            at = raw.rfind(b"}")
            raw = raw[:at] + b', "deep": ' + b"[" * DEEP * 20 + b"]" * DEEP * 20 + raw[at:]
    return raw

"""Sizes as people write them, read in one way: `1GB` is 10^9, `1GiB` and `1G` are 2^30."""

from __future__ import annotations

import math
import re

from ringside.errors import UsageError

_SIZE = re.compile(r"^((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:e\+?[0-9]+)?)\s*(?:([kmgtp])(ib?|b)?|b)?$", re.IGNORECASE)


def parse_size(text: str, *, binary: bool = False) -> float | None:
    """Return the bytes that a size stands for, 0 or more and finite; None: it is none.

    Args:
        text: Such as `1048576`, `16M`, `2 GiB`, `1.5e9`.
        binary: Take `16MB` for 16 · 2^20 as well, as nccl-tests' output and its tables mean it.
    """
    match = _SIZE.match(text.strip())
    if match is None:
        return None
    decimal = (match[3] or "").lower() == "b" and not binary
    value = float(match[1]) * (1000.0 if decimal else 1024.0) ** " kmgtp".index((match[2] or " ").lower())
    return value if math.isfinite(value) else None


def size_bytes(text: str, option: str) -> float:
    """Return the bytes that a size stands for, more than 0.

    Args:
        text: As for `parse_size`.
        option: Where it was given, for the error.

    Raises:
        UsageError: It is no size, or not more than 0.
    """
    found = parse_size(text)
    if found is None:
        raise UsageError(f"{option} {text}: a size such as 1GB (10^9), 1GiB or 1G (2^30), or a number of bytes")
    if not found > 0:
        raise UsageError(f"{option} {text}: more than 0 bytes")
    return found

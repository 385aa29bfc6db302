"""Bytes from outside that are not of the form they should have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

_T = TypeVar("_T")
_D = TypeVar("_D")
UNDECODABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding them may raise: they are not of that form, no text (or no number of that size), or nested too deep."""
MOST_RANKS = 1 << 20


def converted(value: object, kind: type[_T], default: _D) -> _T | _D:
    """Return a plain value as one of `kind`; the default where it is none."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except UNDECODABLE:
        return default


def nan_for_null(value: Any) -> Any:
    """Return a JSON value with null replaced by NaN, which JSON does not have, at every depth."""
    if isinstance(value, dict):
        return {key: nan_for_null(item) for key, item in value.items()}
    if isinstance(value, list):
        return [nan_for_null(item) for item in value]
    return math.nan if value is None else value


def plain_count(value: object) -> int:
    """Return a rank or a number of ranks as it stands in an untrusted file; -1 for what cannot be one."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) < MOST_RANKS else -1


def plain_ranks(ranks: object) -> tuple[int, ...]:
    """Return ranks recorded as a list, or as the text of one; what is left out by `...` is not there."""
    if isinstance(ranks, str):
        return tuple(int(text[:18]) for text in re.findall(r"\d+", ranks))
    if isinstance(ranks, Sequence):
        return tuple(rank for rank in ranks if isinstance(rank, int))
    return ()

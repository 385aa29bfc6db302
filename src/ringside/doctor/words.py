"""Ranks and counts in words, for readers of many kinds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby


def rank_list(ranks: Iterable[int]) -> str:
    """Return ranks as short as they can be said: `0-7, 9, 12-15`."""
    pieces = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda item: item[1] - item[0]):
        numbers = [rank for _, rank in run]
        if len(numbers) > 2:
            pieces.append(f"{numbers[0]}-{numbers[-1]}")
        else:
            pieces.extend(str(number) for number in numbers)
    return ", ".join(pieces)


def named(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-7 and 9`."""
    text = rank_list(ranks)
    head, comma, tail = text.rpartition(", ")
    return f"rank {text}" if len(ranks) == 1 else f"ranks {head}{' and ' if comma else ''}{tail}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return `1 call`, `2 calls`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def first_line(text: str, most: int = 200) -> str:
    """Return the first line of a text, cut where it is long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= most else line[: most - 1] + "…"

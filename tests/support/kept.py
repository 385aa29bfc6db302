"""Whole results, held against those that were kept: one test looks at every figure and every word at once.

What is kept was looked at by somebody, and lies beside the test in `kept/` as JSON. `pytest --write-kept` writes anew
what differs: read the difference before it is committed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

CLOSE, LEAST = 1e-6, 1e-12
"""Floats are the same within this ratio, or this difference: other processors round otherwise."""

SHOWN, WIDE = 8, 240


class Kept:
    """Compares results with those that were kept.

    Args:
        folder: Where they lie.
        write: Whether those that differ are written anew.
    """

    def __init__(self, folder: Path, *, write: bool) -> None:
        self._folder, self._write = folder, write

    def __call__(self, name: str, found: object) -> None:
        """Fail unless a result is the one kept under a name.

        Args:
            name: Of the file, without its suffix.
            found: Anything that is made of numbers, text, arrays, lists, dictionaries, data classes and structs.
        """
        path, result = self._folder / f"{name}.json", _plain(found)
        kept = json.loads(path.read_text()) if path.exists() else None
        different = list(_differences(kept, result))
        if different and self._write:
            self._folder.mkdir(exist_ok=True)
            path.write_text(_text(result) + "\n")
            return
        assert not different, f"{len(different)} differences from {path} (--write-kept writes it anew):\n" + "\n".join(
            different[:SHOWN]
        )


def _plain(value: Any) -> Any:
    """Return a result as JSON has it; what JSON has no number for is text."""
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    names = [one.name for one in fields(value)] if is_dataclass(value) else value.__struct_fields__
    return {name: _plain(getattr(value, name)) for name in names}


def _differences(kept: Any, found: Any, where: str = "") -> Iterator[str]:
    if isinstance(kept, dict) and isinstance(found, dict) and list(kept) == list(found):
        for key in kept:
            yield from _differences(kept[key], found[key], f"{where}.{key}")
    elif isinstance(kept, list) and isinstance(found, list) and len(kept) == len(found):
        for index, (one, other) in enumerate(zip(kept, found, strict=True)):
            yield from _differences(one, other, f"{where}[{index}]")
    elif not _is_same(kept, found):
        yield f"{where or 'all'}: {json.dumps(found)[:200]} instead of {json.dumps(kept)[:200]}"


def _is_same(kept: Any, found: Any) -> bool:
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (kept, found))
    if numbers and (isinstance(kept, float) or isinstance(found, float)):
        return math.isclose(kept, found, rel_tol=CLOSE, abs_tol=LEAST)
    return type(kept) is type(found) and bool(kept == found)


def _text(value: Any, indent: str = "") -> str:
    """Return JSON with one line for whatever fits into one, so that a difference is short to read."""
    line = json.dumps(value, ensure_ascii=False)
    if len(line) + len(indent) <= WIDE or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_text(one, deeper)}" for key, one in value.items()]
        return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(deeper + _text(one, deeper) for one in value) + f"\n{indent}]"

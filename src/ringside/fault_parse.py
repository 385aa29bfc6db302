"""Reading a fault from words, such as `slow:rank=1,factor=1.3,from_step=40`."""

from __future__ import annotations

import math
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from ringside.errors import UsageError
from ringside.fault_specs import KINDS, Diverge, Fault, Input, Pause, Slow, Uneven

MOST_FACTOR = 1000.0


def parse_fault(spec: str, ranks: int | None = None) -> Fault | None:
    """Return the fault that `spec` describes; None for `none`.

    Args:
        spec: Such as `slow:rank=1,factor=1.3,from_step=40`.
        ranks: Size of the world, where it is known; the fault's rank must be inside.

    Raises:
        UsageError: There is no such fault, or it cannot be; the message lists what exists.
    """
    name, _, rest = spec.strip().partition(":")
    if name == "none" and not rest:
        return None
    if name not in KINDS:
        raise _refused(spec, f"there is no fault {name!r}")
    fault = KINDS[name](**_values(spec, KINDS[name], rest))
    _check(spec, fault, ranks)
    return fault


def _values(spec: str, kind: type[Fault], text: str) -> dict[str, Any]:
    types = {name: hint for name, hint in get_type_hints(kind).items() if hint in (int, float)}
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in types or not equals:
            raise _refused(spec, f"{kind.kind} takes {', '.join(f'{name}=' for name in types)} not {part!r}")
        if key in values:
            raise _refused(spec, f"{key} is given twice")
        values[key] = _number(spec, key, value, types[key])
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in values]
    if missing:
        raise _refused(spec, f"{kind.kind} needs {' and '.join(f'{name}=' for name in missing)}")
    return values


def _number(spec: str, key: str, text: str, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
    except ValueError:
        raise _refused(spec, f"{key}={text!r} is no {'whole ' if kind is int else ''}number") from None
    if value < 0 or not math.isfinite(value):
        raise _refused(spec, f"{key}={text} cannot be")
    return value


def _check(spec: str, fault: Fault, ranks: int | None) -> None:
    if ranks is not None and fault.rank >= ranks:
        raise _refused(spec, f"there is no rank {fault.rank} among {ranks} ranks (0 to {ranks - 1})")
    if isinstance(fault, Slow | Uneven) and not 1 < fault.factor <= MOST_FACTOR:
        raise _refused(spec, f"a factor is more than 1 and at most {MOST_FACTOR:g}, not {fault.factor:g}")
    if isinstance(fault, Pause | Input) and fault.seconds <= 0:
        raise _refused(spec, f"{'a pause' if isinstance(fault, Pause) else 'waiting'} takes more than 0 seconds")
    if isinstance(fault, Diverge) and not fault.by:
        raise _refused(spec, "a change by 0 changes nothing")


def _refused(spec: str, why: str) -> UsageError:
    examples = ", ".join(f'"{kind.example}"' for kind in KINDS.values())
    return UsageError(f"cannot inject {spec!r}: {why}. What exists: {examples}, none")

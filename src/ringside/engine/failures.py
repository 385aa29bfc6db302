"""Turn what the core tells of a failed collective into the error that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringside.engine.dtypes import DTYPES, OPS
from ringside.engine.request import KINDS
from ringside.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, RingsideError, UsageError

_MISMATCH, _PEER_LOST, _DEADLINE, _INTERRUPTED, _CLOSED = 1, 2, 3, 4, 5
_NO_WEIGHT, _WITHDRAWN = 7, 8
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_ALGORITHMS = ("", "one_shot", "direct", "a schedule")


def dtype_name(code: int) -> str:
    """Return a dtype's name."""
    return DTYPES[code]


def error_of(failure: dict[str, Any], what: str, rank: int, timeout_s: float, group: str = "") -> RingsideError:
    """Return the error for a core failure.

    Args:
        failure: What `core.failure()` returned.
        what: The collective, in words.
        rank: This rank.
        timeout_s: The deadline that was in force, seconds.
        group: Of which group the ranks are, in words that follow on "rank 1"; "": of all there are.
    """
    status, ranks, seq = failure["status"], failure["ranks"], failure["seq"]
    where = f"{what} (collective {seq}) on rank {rank}{group}"
    if status == _MISMATCH:
        return MismatchError(_describe_mismatch(failure), ranks)
    if status == _PEER_LOST:
        return PeerLostError(
            f"{where}: {name_ranks(ranks)} died or left, {_missing(failure['missing'], ranks)}"
            "restart from the last checkpoint",
            ranks,
        )
    if status == _DEADLINE:
        return DeadlineError(
            f"{where}: {name_ranks(ranks)} did not arrive within {timeout_s:g} s, though alive; "
            "look at what it does, or raise RINGSIDE_TIMEOUT_S",
            ranks,
        )
    if status == _NO_WEIGHT:
        return UsageError(f"{where}: the weights of all ranks sum to 0, so there is no mean; nothing was changed")
    if status == _INTERRUPTED:
        return ClosedError(f"{where}: interrupted while waiting; this communicator cannot be used any more")
    if status == _WITHDRAWN:
        return ClosedError(
            f"{where}: given up, because another communicator failed that used the same memory; "
            "this one cannot be used any more"
        )
    return ClosedError(f"{where}: the communicator is closed on this rank")


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 3"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def _missing(missing: Sequence[int], gone: Sequence[int]) -> str:
    others = [rank for rank in missing if rank not in gone]
    return f"so {name_ranks(others)} gave up too; " if others else ""


def _describe_mismatch(failure: dict[str, Any]) -> str:
    """Name both sides: which ranks called what."""
    sides: dict[str, list[int]] = {}
    for rank, call in enumerate(failure["calls"]):
        sides.setdefault(_describe_call(*call), []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)} called {call}" for call, ranks in sides.items())
    return f"collective {failure['seq']}: ranks called different things: {told}"


def _describe_call(
    kind: int,
    dtype: int,
    op: int,
    algorithm: int,
    count: int,
    scale: float,
    dims: tuple[int, ...],
    root: int,
    own_scale: bool,
    bounds: Sequence[int],
) -> str:
    name = KINDS[kind]
    if name == "barrier":
        return "barrier()"
    if name == "split":
        return "split()"
    words = [OPS[op]] if "reduce" in name else []
    words.append(f"shape {dims}" if dims or count == 1 else f"{count} elements")
    words.insert(len(words) if name == "empty" else len(words) - 1, DTYPES[dtype])
    if name in _ROOTED:
        words.append(f"root={root}")
    if bounds:
        words.append(f"bounds={_shortened(bounds)}")
    if own_scale:
        words.append("each rank with its own weight")
    elif scale != 1.0:
        words.append(f"scale={scale!r}")
    if name == "all_reduce":
        words.append(f"algorithm={_ALGORITHMS[algorithm]}")
    return f"{name}({', '.join(words)})"


def _shortened(bounds: Sequence[int]) -> str:
    texts = [str(bound) for bound in bounds]
    return "[" + ", ".join(texts if len(texts) <= 17 else [*texts[:8], "...", *texts[-8:]]) + "]"

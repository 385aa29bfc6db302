"""Turns a failure that the core reports into the error to raise, with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringside._core.enums import Algorithm, Status
from ringside.engine.dtypes import DTYPES, OPS
from ringside.engine.request import KINDS
from ringside.errors import ClosedError, DeadlineError, MismatchError, PeerLostError, RingsideError, UsageError
from ringside.text import CLOSED, MISMATCH, name_ranks, timed_out

_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_NAMES = {Algorithm.automatic: "", Algorithm.program: "a schedule"}  # of algorithms, as callers write them


def error_of(failure: dict[str, Any], collective: str, rank: int, timeout_s: float, group: str = "") -> RingsideError:
    """Return the error for a core failure.

    Args:
        failure: What `core.failure()` returned.
        collective: The collective's name.
        rank: This rank.
        timeout_s: The deadline that was in force, seconds.
        group: Of which group the ranks are, as a phrase that follows on "rank 1"; "": of all there are.
    """
    status, ranks, seq = failure["status"], failure["ranks"], failure["seq"]
    where = f"{collective} (collective {seq}) on rank {rank}{group}"
    if status == Status.mismatch:  # group the ranks by what they called
        sides: dict[str, list[int]] = {}
        for caller, call in enumerate(failure["calls"]):
            sides.setdefault(_describe_call(*call), []).append(caller)
        calls = "; ".join(f"{name_ranks(callers)} called {call}" for call, callers in sides.items())
        return MismatchError(f"collective {seq}: {MISMATCH}: {calls}", ranks)
    if status == Status.peer_lost:
        # Ranks that are missing and not dead gave up because of the dead ones: they are victims.
        victims = [other for other in failure["missing"] if other not in ranks]
        gave_up = f"so {name_ranks(victims)} gave up too; " if victims else ""
        return PeerLostError(
            f"{where}: {CLOSED}: {name_ranks(ranks)} died or left, {gave_up}restart from the last checkpoint", ranks
        )
    if status == Status.deadline:
        return DeadlineError(
            f"{where}: {timed_out(timeout_s)}: {name_ranks(ranks)} did not arrive, though alive; "
            "look at what it does, or raise RINGSIDE_TIMEOUT_S",
            ranks,
        )
    if status == Status.no_weight:
        return UsageError(f"{where}: the weights of all ranks sum to 0, so there is no mean; nothing was changed")
    if status == Status.interrupted:
        return ClosedError(f"{where}: interrupted while waiting; this communicator cannot be used any more")
    if status == Status.withdrawn:
        return ClosedError(
            f"{where}: given up, because another communicator failed that used the same memory; "
            "this one cannot be used any more"
        )
    return ClosedError(f"{where}: the communicator is closed on this rank")


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
    """Return a call as its caller would write it; the arguments are the core's `CollectiveSignature`, in its order."""
    name = KINDS[kind]
    if name in ("barrier", "split"):
        return f"{name}()"
    arguments = [OPS[op]] if "reduce" in name else []
    shape = f"shape {dims}" if dims or count == 1 else f"{count} elements"
    arguments += [shape, DTYPES[dtype]] if name == "empty" else [DTYPES[dtype], shape]
    if name in _ROOTED:
        arguments.append(f"root={root}")
    if bounds:
        texts = [str(bound) for bound in bounds]
        if len(texts) > 17:  # of many ranks the first and the last ones
            texts = [*texts[:8], "...", *texts[-8:]]
        arguments.append(f"bounds=[{', '.join(texts)}]")
    if own_scale:
        arguments.append("each rank with its own weight")
    elif scale != 1.0:
        arguments.append(f"scale={scale!r}")
    if name == "all_reduce":
        arguments.append(f"algorithm={_NAMES.get(algorithm, Algorithm(algorithm).name)}")
    return f"{name}({', '.join(arguments)})"

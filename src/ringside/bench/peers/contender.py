"""An engine under test, as a value: what the measuring loop needs of it and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ringside.engine import HostCommunicator
from ringside.errors import UsageError


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Contender:
    """One engine with one kind of tensor.

    Args:
        engine: ringside, gloo or mpi.
        tensor: symmetric or private: the pool its buffers are cut from.
        wrap: Makes of a NumPy array over the buffer what `call` takes.
        call: All-reduces it in place.
        algorithm: "auto", or the schedule forced.
        close: Leaves the engine.
    """

    engine: str
    tensor: str
    wrap: Callable[[Any], Any]
    call: Callable[[Any], Any]
    algorithm: str = "auto"
    close: Callable[[], None] = _nothing


def ours(comm: HostCommunicator, dtype: str, op: str, algorithms: tuple[str, ...]) -> list[Contender]:
    """Return our engine on symmetric and on private tensors, for each algorithm."""
    wrap = _wrap_bfloat16 if dtype == "bfloat16" else _as_it_is
    return [
        Contender("ringside", tensor, wrap, _bound(comm, op, algorithm), algorithm)
        for algorithm in algorithms
        for tensor in ("symmetric", "private")
    ]


def _bound(comm: HostCommunicator, op: str, algorithm: str) -> Callable[[Any], Any]:
    if algorithm == "auto":
        return comm.all_reduce if op == "sum" else partial(comm.all_reduce, op=op)
    return partial(comm.all_reduce, op=op, algorithm=algorithm)


def _as_it_is(array: Any) -> Any:
    return array


def _wrap_bfloat16(array: Any) -> Any:
    try:
        from ringside.bench.peers.torch_tensors import as_torch
    except ImportError as error:
        raise UsageError(f"bfloat16 tensors need torch, which is not installed ({error})") from None
    return as_torch(array, "bfloat16")

"""An engine under test, as a value: what the measuring loop needs of it and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ringside.engine import HostCommunicator
from ringside.errors import UsageError


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
    close: Callable[[], None] = lambda: None


def ours(comm: HostCommunicator, dtype: str, op: str, algorithms: tuple[str, ...]) -> list[Contender]:
    """Return our engine on symmetric and on private tensors, for each algorithm."""
    wrap: Callable[[Any], Any] = np.asarray  # as it is
    if dtype == "bfloat16":  # NumPy has none: torch's tensors are views of the same memory
        try:
            from ringside.bench.peers.torch_tensors import as_torch
        except ImportError as error:
            raise UsageError(f"bfloat16 tensors need torch, which is not installed ({error})") from None
        wrap = partial(as_torch, dtype=dtype)
    contenders = []
    for algorithm in algorithms:
        # As a user calls it: no argument that has its default.
        call: Callable[[Any], Any] = comm.all_reduce
        if algorithm != "auto":
            call = partial(comm.all_reduce, op=op, algorithm=algorithm)
        elif op != "sum":
            call = partial(comm.all_reduce, op=op)
        contenders += [Contender("ringside", tensor, wrap, call, algorithm) for tensor in ("symmetric", "private")]
    return contenders

"""The process group's own all-reduce, as a candidate beside our schedules."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.dtypes import DTYPES, FLOATING, OPS
from ringside.engine.transports.connections import close_connections, watched_connections
from ringside.engine.transports.io_threads import patient_io_threads
from ringside.engine.transports.transport import Bytes, Cause, LinkError
from ringside.errors import UnsupportedError

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
"""What torch calls reductions; it is told to sum where avg is asked for."""

_DTYPES = [getattr(torch, name) for name in DTYPES]


@functools.cache
def _options(op: int) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = REDUCE_OPS[OPS[op]]
    return options


Begin = Callable[[], Callable[[], None]]
"""Begins something and returns what waits for its end."""

_JOINING = datetime.timedelta(seconds=60)  # the ranks are all there


class TorchNative:
    """All-reduce by Gloo, over all ranks or over one rank per host.

    Args:
        store: A part of the job's store that only this uses.
        rank: This rank.
        size: Number of ranks.
        timeout_s: Longest wait, seconds.
        dead_after_s: As for `TorchPeerToPeer`.
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, dead_after_s: float = 4.0) -> None:
        self._dead_after_s = dead_after_s
        self._store, self._rank, self._size = store, rank, size
        self._everybody = tuple(range(size))
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], Any] = {}

    def check(self, dtype: int, op: int) -> None:
        """Raise `UnsupportedError` for what Gloo cannot reduce."""
        name = "sum" if OPS[op] == "avg" else OPS[op]
        bitwise = name in ("band", "bor", "bxor")
        if DTYPES[dtype] in ("int16", "bool") or (bitwise and DTYPES[dtype] in FLOATING):
            raise UnsupportedError(f"Gloo has no {name} of {DTYPES[dtype]}: name another algorithm than native")

    def all_reduce(self, data: Bytes, dtype: int, op: int, members: Sequence[int] | None) -> None:
        """Reduce in place; see `ringside.engine.across.Native`."""
        if len(data):
            self.prepare(data, dtype, op, members)()()

    def prepare(self, data: Bytes, dtype: int, op: int, members: Sequence[int] | None) -> Begin:
        """Return what begins `all_reduce` of data that are not empty and stay where they are; that returns its end."""
        tensors = [torch.from_numpy(data).view(_DTYPES[dtype])]
        return functools.partial(self._begin, tensors, _options(op), tuple(members or self._everybody))

    def _begin(self, tensors: list[torch.Tensor], options: Any, members: tuple[int, ...]) -> Callable[[], None]:
        try:
            group = self._groups.get(members) or self._new_group(members)
            return functools.partial(_finish, group.allreduce(tensors, options))
        except RuntimeError as error:
            raise _in_words(error) from None

    def abandon(self) -> None:
        """End what is under way; see `ringside.engine.across.Native`."""
        for group in self._groups.values():
            close_connections(group)

    def _new_group(self, members: tuple[int, ...]) -> Any:
        store = PrefixStore(",".join(map(str, members)), self._store)
        gloo: Any = dist.ProcessGroupGloo
        with watched_connections(self._dead_after_s), patient_io_threads():
            self._groups[members] = gloo(store, members.index(self._rank), len(members), min(self._timeout, _JOINING))
        return self._groups[members]


def _finish(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _in_words(error) from None


def _in_words(error: RuntimeError) -> LinkError:
    late = "Timed out" in str(error)
    return LinkError(Cause("late" if late else "lost", -1), str(error)[:300])

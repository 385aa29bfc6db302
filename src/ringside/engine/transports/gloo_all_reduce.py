"""The process group's own all-reduce, as a candidate beside our schedules."""

from __future__ import annotations

import ctypes
import datetime
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.dtypes import DTYPES, FLOATING, OPS
from ringside.engine.transports.arrival import await_arrivals
from ringside.engine.transports.base import NOBODY, Bytes, LinkError, LinkFailure
from ringside.engine.transports.gloo_internals import (
    Connections,
    close_connections,
    patient_io_threads,
    watched_connections,
)
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
"""torch's names of reductions; avg is a sum, divided afterwards."""

_DTYPES = [getattr(torch, name) for name in DTYPES]


@functools.cache
def _options(op: int) -> Any:
    options: Any = dist.AllreduceOptions()
    options.reduceOp = REDUCE_OPS[OPS[op]]
    return options


JOINING_S = 60.0  # the ranks are all there
_POLL = datetime.timedelta(seconds=0.25)
_ABORT_WAIT_S, _ABORT_POLL_S, _CHECK_S = 0.05, 0.001, 1.0
_NOT_YET = "Operation timed out"  # torch's message where a wait is over and the work is not


class GlooAllReduce:
    """All-reduce by Gloo, over all ranks or over one rank per host.

    Args:
        store: A part of the job's store that only this uses.
        rank: This rank.
        size: Number of ranks.
        timeout_s: Longest wait, seconds.
        has_lost: Returns whether a rank is lost, or (where the second argument says so) left: `GlooTransport.has_lost`.
            Called for all that take part once a connection was closed: Gloo may not report it where a part of a message
            is there (`gloo_internals.end_wait`).
        joining_s: Longest wait for each other while a group is made, once all ranks are there, seconds.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        has_lost: Callable[[int, bool], bool],
        joining_s: float = JOINING_S,
    ) -> None:
        self._joining = datetime.timedelta(seconds=joining_s)
        self._store, self._rank, self._size = store, rank, size
        self._timeout_s = timeout_s
        self._has_lost = has_lost
        self._groups: dict[tuple[int, ...], Any] = {}
        self._connections: dict[tuple[int, ...], Connections] = {}
        self._over = self._doubtful = False
        self._unawaited: list[Any] = []  # works whose wait was interrupted

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long from now on, seconds."""
        self._timeout_s = timeout_s
        for group in list(self._groups.values()):
            group._set_default_timeout(datetime.timedelta(seconds=timeout_s))

    def check(self, dtype: int, op: int) -> None:
        """Raise `UnsupportedError` for what Gloo cannot reduce."""
        name = "sum" if OPS[op] == "avg" else OPS[op]
        bitwise = name in ("band", "bor", "bxor")
        if DTYPES[dtype] in ("int16", "bool") or (bitwise and DTYPES[dtype] in FLOATING):
            raise UnsupportedError(f"Gloo has no {name} of {DTYPES[dtype]}: name another algorithm than native")

    def prepare(self, data: Bytes, dtype: int, op: int, members: Sequence[int] | None) -> Callable[[], None]:
        """Return what reduces data in place; see `ringside.engine.net.context.NativeAllReduce`."""
        tensors = [torch.from_numpy(data).view(_DTYPES[dtype])]
        return functools.partial(self._all_reduce, tensors, _options(op), tuple(members or range(self._size)))

    def _all_reduce(self, tensors: list[torch.Tensor], options: Any, members: tuple[int, ...]) -> None:
        try:
            group = self._groups.get(members) or self._new_group(members)
            work = group.allreduce(tensors, options)
        except RuntimeError as error:
            raise _link_error(error) from None
        try:
            while not _has_ended(work):
                self._doubtful |= self._connections[members].some_closed()
                self._check_peers(members, or_left=False)  # one that left may have done its part
        except RuntimeError as error:
            raise _link_error(error) from None
        except BaseException:
            self._unawaited.append(work)
            if self._over:
                _await(work)
            raise

    def close(self) -> None:
        """Leave; see `ringside.engine.net.context.NativeAllReduce`."""
        for group in list(self._groups.values()):
            close_connections(group)

    def abort(self) -> None:
        """End what is under way; see `ringside.engine.net.context.NativeAllReduce`."""
        self._over = True
        for group in list(self._groups.values()):
            _keep_for_ever(group)
        self.close()
        for work in self._unawaited:
            _await(work)

    def _new_group(self, members: tuple[int, ...]) -> Any:
        store = PrefixStore(",".join(map(str, members)), self._store)
        checked = time.monotonic()

        def attend(_: int) -> None:
            nonlocal checked
            if time.monotonic() - checked > _CHECK_S:
                self._check_peers(members, or_left=True)
                checked = time.monotonic()

        await_arrivals(store, self._rank, members, self._timeout_s, attend)
        # Then have Gloo connect them.
        gloo: Any = dist.ProcessGroupGloo
        timeout = datetime.timedelta(seconds=self._timeout_s)
        with watched_connections() as connections, patient_io_threads():
            group = gloo(store, members.index(self._rank), len(members), min(timeout, self._joining))
        group._set_default_timeout(timeout)
        self._groups[members], self._connections[members] = group, connections
        if self._over:  # aborted before the group was there
            _keep_for_ever(group)
            close_connections(group)
            raise LinkError(LinkFailure("lost", NOBODY), "given up")
        return group

    def _check_peers(self, members: tuple[int, ...], *, or_left: bool) -> None:
        """Raise `LinkError` where it makes no sense to wait any longer."""
        if self._over:
            raise LinkError(LinkFailure("lost", NOBODY), "given up")
        if not or_left and not self._doubtful:
            return
        if any(self._has_lost(rank, or_left) for rank in members if rank != self._rank):
            # The transport finds the culprit.
            raise LinkError(LinkFailure("lost", NOBODY), "a connection is broken")


def _has_ended(work: Any) -> bool:
    """Wait a moment; return whether the work has ended, or raise its error."""
    try:
        work.wait(_POLL)
    except RuntimeError as error:
        if _NOT_YET not in str(error):
            raise
        if not work.is_completed():
            return False
        work.wait()  # it ended just then, well or with an error of its own
    return True


def _await(work: Any) -> None:
    """Wait a moment for the end of an aborted work: it writes the caller's memory. A half received one never ends."""
    deadline = time.monotonic() + _ABORT_WAIT_S
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(_ABORT_POLL_S)


def _keep_for_ever(group: Any) -> None:
    """Keep a group from being destroyed: its destructor joins a thread that waits for a message until its timeout."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _link_error(error: RuntimeError) -> LinkError:
    late = "Timed out" in str(error)
    return LinkError(LinkFailure("late" if late else "lost", NOBODY), str(error)[:300])

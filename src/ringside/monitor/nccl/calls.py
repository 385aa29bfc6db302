"""Collectives and messages of one process, put together from the records of its ring; pure.

A collective's own start and stop say when the host enqueued it, or where NCCL tells it (from 2.28 on, outside of
captured graphs) when the API was called. A rank has come to it when the first of its channels' kernels starts, and is
through when the last one stops; both are times of the GPU. An end may never come.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.nccl.ring import (
    CALLED,
    CAPTURED,
    COLLECTIVE,
    FOREIGN,
    KERNEL,
    KIND_BITS,
    MESSAGE,
    PROXY,
    RECORD,
    SENDS,
    STARTED,
    STEP,
    STOPPED,
    Records,
)

SETTLED_NS = 250_000_000
"""A call whose kernels have all ended is over once nothing of it has come for so long: proxies report late."""
GIVEN_UP_NS = 60_000_000_000
"""One whose end has not come is taken as it is when nothing of it has come for so long, and no kernel of the process is
open: in one a rank may wait for another as long as it likes, and what was called after it waits too."""
MOST_CALLS = 1024
"""So many wait for their end; of more, the oldest are taken as they are."""
UNKNOWN = 2**32 - 1
"""The communicator of what a proxy does for another process."""

WAITS = {8: "send_gpu", 20: "send_peer", 9: "send", 10: "recv"}
"""The states of a proxy's step whose time is added up: it waits for its GPU's data, for the receiver to be ready, for
the network to have taken it, for data from the network."""

CALL = np.dtype(
    [
        ("communicator", "u4"),
        ("is_message", "?"),
        ("is_captured", "?"),
        ("is_called", "?"),  # `enqueued_ns` is before its kernel's launch
        ("func", "S16"),
        ("datatype", "S16"),
        ("algorithm", "S16"),
        ("protocol", "S11"),
        ("number", "u8"),
        ("count", "u8"),
        ("peer", "i4"),
        ("channels", "i4"),  # whose kernel has started
        ("enqueued_ns", "u8"),
        ("arrived_gpu_ns", "u8"),  # 0: no kernel has started
        ("ended_gpu_ns", "u8"),  # 0: not all kernels have ended, or not all starts were recorded
        ("proxy_ended_ns", "u8"),  # 0: no proxy has worked for it
    ]
)
"""A collective or message; `_ns` is the host's monotonic clock, `_gpu_ns` the GPU's."""

WAIT = np.dtype(
    [("communicator", "u4"), ("peer", "i4"), ("sends", "?"), ("steps", "i8"), ("size_bytes", "u8")]
    + [(name, "f8") for name in WAITS.values()]
)
"""What the proxies waited for at the steps that were recorded, summed per peer; seconds."""


class Joined(NamedTuple):
    """What is over since the last time.

    Args:
        calls: Of dtype `CALL`, in the order in which they were enqueued.
        waits: Of dtype `WAIT`.
    """

    calls: NDArray[np.void]
    waits: NDArray[np.void]


class Calls:
    """Puts the records of one process together."""

    def __init__(self) -> None:
        self._records: Records = np.zeros(0, RECORD)

    def add(self, records: Records, now_ns: int, *, is_last: bool = False) -> Joined:
        """Take in records; return what is over.

        Args:
            records: The next ones of the ring.
            now_ns: The monotonic clock.
            is_last: No more will come: all that has begun is returned.
        """
        records = np.concatenate([self._records, records])
        kind, host = records["kind"], records["host_ns"].astype(np.int64)
        is_start = records["what"] == STARTED
        # The event that each record is of, by where it starts; then the call that it belongs to: at most two above.
        before = self._where(records)
        event = np.where(is_start, np.arange(len(records)), before)
        root = event.copy()
        for _ in range(2):
            has_parent = (root >= 0) & (kind[root] >= KERNEL) & ((records["flags"][root] & FOREIGN) == 0)
            root = np.where(has_parent, before[root], root)
        known = (root >= 0) & np.isin(kind[root], (COLLECTIVE, MESSAGE, PROXY))

        latest = np.zeros(len(records), np.int64)
        np.maximum.at(latest, root[known], host[known])
        open_kernels, kernels = np.zeros(len(records), np.int64), np.zeros(len(records), np.int64)
        starts = known & is_start & (kind == KERNEL)
        stops = known & (kind == KERNEL) & (records["what"] == STOPPED)
        np.add.at(kernels, root[starts], 1)
        np.add.at(open_kernels, root[starts], 1)
        np.subtract.at(open_kernels, root[stops], 1)
        # A start for which the ring had no room would make a stay shorter. Symmetric kernels tell of no channels.
        has_ended = (kernels > 0) & (open_kernels <= 0) & (kernels >= records["channels"])
        quiet = now_ns - latest
        is_done = (has_ended & (quiet >= SETTLED_NS)) | is_last
        if not (open_kernels > 0).any():
            is_done |= quiet >= GIVEN_UP_NS
        waiting = np.flatnonzero(known & ~is_done & ~has_ended & (root == np.arange(len(records))))
        is_done[waiting[: max(len(waiting) - MOST_CALLS, 0)]] = True
        done = known & is_done[root]
        self._records = records[known & ~done]

        first_gpu = np.full(len(records), np.iinfo(np.uint64).max, np.uint64)
        last_gpu = np.zeros(len(records), np.uint64)
        np.minimum.at(first_gpu, root[starts], records["gpu_ns"][starts])
        np.maximum.at(last_gpu, root[stops], records["gpu_ns"][stops])
        proxy_end = np.zeros(len(records), np.uint64)
        ends = known & (records["what"] == STOPPED) & (kind >= PROXY)
        np.maximum.at(proxy_end, root[ends], records["host_ns"][ends])

        at = np.flatnonzero(done & (root == np.arange(len(records))) & (kind <= MESSAGE))
        calls = np.zeros(len(at), CALL)
        for name in ("communicator", "func", "datatype", "algorithm", "protocol", "number", "count", "peer"):
            calls[name] = records[name][at]
        calls["is_message"] = kind[at] == MESSAGE
        calls["is_captured"] = (records["flags"][at] & CAPTURED) != 0
        calls["is_called"] = (records["flags"][at] & CALLED) != 0
        calls["channels"] = kernels[at]
        calls["enqueued_ns"] = records["host_ns"][at]
        has_kernel = kernels[at] > 0
        calls["arrived_gpu_ns"] = np.where(has_kernel, first_gpu[at], 0)
        calls["ended_gpu_ns"] = np.where(has_ended[at], last_gpu[at], 0)
        calls["proxy_ended_ns"] = proxy_end[at]
        return Joined(calls, _sum_waits(records, event, before, done & (kind == STEP)))

    @staticmethod
    def _where(records: Records) -> NDArray[np.int64]:
        """Return where the event that each record names starts; -1: not here."""
        number = records["handle"] >> np.uint64(KIND_BITS)
        at = np.searchsorted(records["sequence"], number)
        at[at == len(records)] = 0
        is_there = (number > 0) & (records["sequence"][at] == number) if len(records) else np.zeros(0, bool)
        return np.where(is_there, at, -1)


def _sum_waits(
    records: Records, event: NDArray[np.int64], before: NDArray[np.int64], of_steps: NDArray[np.bool_]
) -> NDArray[np.void]:
    """Return what proxies waited for, per peer.

    Args:
        records: All of them.
        event: Of every record where its event starts.
        before: Of every record where the event that it names starts: of a step's start, its operation.
        of_steps: Which records are of steps that are over.
    """
    at = np.flatnonzero(of_steps)
    # The records of one step one after the other: a state lasts until the next one.
    at = at[np.lexsort((records["host_ns"][at], event[at]))]
    if not len(at):
        return np.zeros(0, WAIT)
    host = records["host_ns"][at].astype(np.int64)
    seconds = np.zeros(len(at))
    seconds[:-1] = np.where(event[at][1:] == event[at][:-1], (host[1:] - host[:-1]) / 1e9, 0.0)
    operation = records[before[event[at]]]
    keys, index = np.unique(
        np.array([operation["communicator"], operation["peer"], operation["flags"] & SENDS], np.int64),
        axis=1,
        return_inverse=True,
    )
    index = index.reshape(-1)
    waits = np.zeros(keys.shape[1], WAIT)
    waits["communicator"], waits["peer"], waits["sends"] = keys
    is_start = records["what"][at] == STARTED
    waits["steps"] = np.bincount(index[is_start], minlength=len(waits))
    sizes = np.zeros(len(waits), np.uint64)
    moved = np.isin(records["state"][at], (9, 10))  # told when it is sent, and when it is to come
    np.add.at(sizes, index[moved], records["count"][at][moved])
    waits["size_bytes"] = sizes
    for state, name in WAITS.items():
        of_state = records["state"][at] == state
        waits[name] = np.bincount(index[of_state], weights=seconds[of_state], minlength=len(waits))
    return waits

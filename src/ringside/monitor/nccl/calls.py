"""Collectives of one process, put together from the records of its ring; pure.

A collective's own start and stop say when the host enqueued it, or where NCCL tells it (from 2.28 on, outside of
captured graphs) when the API was called. A rank has come to it when the first of its channels' kernels starts, and is
through when the last one stops; both are times of the GPU. An end may never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.intervals import union
from ringside.monitor.nccl import ring
from ringside.monitor.nccl.ring import RECORD, Records, joined_rows, picked_records

SETTLED_NS = 250_000_000
"""A call whose kernels have all ended is over once nothing of it has come for so long: proxies report late."""
UNTOLD_NS = 5_000_000_000
"""One of which nothing has come for so long is over when a later kernel of its communicator is, for these run in their
order: NCCL does not always tell that a kernel has stopped."""
_LATER_NS = 1_000_000_000
"""A kernel that started so much later is a later one, and no other channel of the same, which calls may share."""
GIVEN_UP_NS = 60_000_000_000
"""One whose end has not come is taken as it is when nothing of it has come for so long, and no kernel of the process is
open: in one a rank may wait for another as long as it likes, and what was called after it waits too."""
MOST_CALLS = 1024
"""So many wait for their end; of more, the oldest are taken as they are."""
UNKNOWN = 2**32 - 1
"""The communicator of what a proxy does for another process."""

_NEVER = np.uint64(2**64 - 1)
_IS_ROOT = np.isin(np.arange(8), (ring.COLLECTIVE, ring.MESSAGE, ring.PROXY))

WAITS = {8: "send_gpu", 20: "send_peer", 9: "send", 10: "recv"}
"""The states of a proxy's step whose time is added up: it waits for its GPU's data, for the receiver to be ready, for
the network to have taken it, for data from the network."""

CALL = np.dtype(
    [
        ("communicator", "u4"),
        ("func", "S16"),
        ("number", "u8"),
        ("is_captured", "?"),
        ("is_called", "?"),  # `enqueued_ns` is before its kernel's launch
        ("enqueued_ns", "u8"),
        ("arrived_gpu_ns", "u8"),  # 0: no kernel has started
        ("ended_gpu_ns", "u8"),  # 0: not all kernels have ended, or not all starts were recorded
    ]
)
"""A collective; `_ns` is the host's monotonic clock, `_gpu_ns` the GPU's."""

WAIT = np.dtype(
    [("communicator", "u4"), ("peer", "i4"), ("sends", "?"), ("steps", "i8"), ("size_bytes", "u8")]
    + [(name, "f8") for name in (*WAITS.values(), "network")]
)
"""What the proxies waited for at the steps that were recorded, summed per peer; seconds. Several steps are under way at
a time, so sums may be longer than the job; `network` is for how long any step waited for the network to take it."""


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
        self._reached: dict[
            int, int
        ] = {}  # by communicator: when the kernel of its last call that is over started, GPU ns

    def add(self, records: Records, now_ns: int, *, is_last: bool = False) -> Joined:
        """Take in records; return what is over.

        Args:
            records: The next ones of the ring.
            now_ns: The monotonic clock.
            is_last: No more will come: all that has begun is returned.
        """
        parts = self._records, records
        count = len(self._records) + len(records)
        if not count:
            return Joined(np.zeros(0, CALL), np.zeros(0, WAIT))
        own = np.arange(count)
        # Records are not copied as a whole, nor is a field looked at twice: each time goes through all of their memory.
        kind, what, host_ns = (_column(parts, name) for name in ("kind", "what", "host_ns"))
        is_start = what == ring.STARTED
        # The event that each record is of, by where it starts; then the call that it belongs to: at most two above.
        # The element behind the last one stands for what is not here.
        before = _where(_column(parts, "sequence"), _column(parts, "handle") >> np.uint64(ring.KIND_BITS))
        event = np.where(is_start, own, before)
        has_parent = kind >= ring.KERNEL
        proxies = np.flatnonzero(kind == ring.PROXY)
        if len(proxies):
            has_parent[proxies] = (_column(parts, "flags")[proxies] & ring.FOREIGN) == 0
        above = np.append(np.where(has_parent, before, own), count)
        root = above[above[event]]
        known = np.append(_IS_ROOT[kind & 7], False)[root]
        of_kernels = known & (kind == ring.KERNEL)
        starts = np.flatnonzero(of_kernels & is_start)
        stops = np.flatnonzero(of_kernels & (what == ring.STOPPED))
        latest = np.zeros(count + 1, np.uint64)
        latest[root] = host_ns  # they come in time's order: of several the last one stays

        # From here on by call: where each begins.
        calls_at = np.flatnonzero(known & (root == own))
        kernels = np.bincount(root[starts], minlength=count)[calls_at]
        open_kernels = kernels - np.bincount(root[stops], minlength=count)[calls_at]
        # A start for which the ring had no room would make a stay shorter. Symmetric kernels tell of no channels.
        begun = _picked(parts, calls_at)
        has_ended = (kernels > 0) & (open_kernels <= 0) & (kernels >= begun["channels"])
        quiet = now_ns - latest[calls_at].astype(np.int64)
        is_settled = has_ended & (quiet >= SETTLED_NS)
        is_done = is_settled | is_last
        is_open = open_kernels > 0
        first_gpu, newest_gpu, last_gpu = np.full(count, _NEVER), np.zeros(count, np.uint64), np.zeros(count, np.uint64)
        gpu_ns = _column(parts, "gpu_ns")
        np.minimum.at(first_gpu, root[starts], gpu_ns[starts])
        np.maximum.at(newest_gpu, root[starts], gpu_ns[starts])
        np.maximum.at(last_gpu, root[stops], gpu_ns[stops])
        settled = begun["communicator"][is_settled]
        for communicator in set(settled.tolist()):
            reached = int(first_gpu[calls_at[is_settled]][settled == communicator].max())
            self._reached[communicator] = max(reached, self._reached.get(communicator, 0))
        for place in np.flatnonzero(is_open & (quiet >= UNTOLD_NS)).tolist():
            reached = self._reached.get(int(begun["communicator"][place]), 0)
            is_done[place] |= reached - int(newest_gpu[calls_at[place]]) >= _LATER_NS
        if not (is_open & ~is_done).any():
            is_done |= quiet >= GIVEN_UP_NS
        waiting = np.flatnonzero(~is_done & ~has_ended)
        is_done[waiting[: max(len(waiting) - MOST_CALLS, 0)]] = True
        done_calls = np.zeros(count + 1, bool)
        done_calls[calls_at] = is_done
        done = done_calls[root]
        self._records = _picked(parts, np.flatnonzero(known & ~done))

        told = np.flatnonzero(is_done & (kind[calls_at] == ring.COLLECTIVE))
        at, begun = calls_at[told], picked_records(begun, told)
        calls = np.zeros(len(at), CALL)
        for name in ("communicator", "func", "number"):
            calls[name] = begun[name]
        calls["is_captured"] = (begun["flags"] & ring.CAPTURED) != 0
        calls["is_called"] = (begun["flags"] & ring.CALLED) != 0
        calls["enqueued_ns"] = begun["host_ns"]
        calls["arrived_gpu_ns"] = np.where(kernels[told] > 0, first_gpu[at], 0)
        calls["ended_gpu_ns"] = np.where(has_ended[told], last_gpu[at], 0)
        steps = np.flatnonzero(done & (kind == ring.STEP))
        return Joined(calls, _sum_waits(joined_rows(parts), event, before, steps) if len(steps) else np.zeros(0, WAIT))


def _column(parts: Sequence[Records], name: str) -> NDArray[Any]:
    """Return a field of records one behind the other."""
    return np.concatenate([part[name] for part in parts])


def _picked(parts: tuple[Records, Records], at: NDArray[np.int64]) -> Records:
    """Return some of records one behind the other; `at` ascends."""
    first, second = parts
    split = int(np.searchsorted(at, len(first)))
    return joined_rows([picked_records(first, at[:split]), picked_records(second, at[split:] - len(first))])


def _where(sequence: NDArray[np.uint64], number: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where the event of each number starts in ascending sequence; `len(sequence)`: not here."""
    count = len(sequence)
    # Nearly all follow each other without a gap. What would be below 0 is a very large number instead.
    at: NDArray[np.int64] = number.view(np.int64) - (int(sequence[-1]) - count + 1)
    is_here = at.view(np.uint64) < count
    is_here &= sequence.take(at, mode="clip") == number
    at[~is_here] = count
    rest = np.flatnonzero(~is_here & (number > 0))
    if len(rest):
        found = np.searchsorted(sequence, number[rest])
        at[rest] = np.where(sequence.take(found, mode="clip") == number[rest], found, count)
    return at


def _sum_waits(
    records: Records, event: NDArray[np.int64], before: NDArray[np.int64], steps: NDArray[np.int64]
) -> NDArray[np.void]:
    """Return what proxies waited for, per peer.

    Args:
        records: All of them.
        event: Of every record where its event starts.
        before: Of every record where the event that it names starts: of a step's start, its operation.
        steps: Where the records are of steps that are over.
    """
    # The records of one step one after the other: a state lasts until the next one.
    at = steps[np.lexsort((records["host_ns"][steps], event[steps]))]
    host = records["host_ns"][at].astype(np.int64)
    seconds = np.zeros(len(at))
    seconds[:-1] = np.where(event[at][1:] == event[at][:-1], (host[1:] - host[:-1]) / 1e9, 0.0)
    operation = records.take(before[event[at]], mode="clip")  # a damaged ring may have steps of nothing
    keys, index = np.unique(
        np.array([operation["communicator"], operation["peer"], operation["flags"] & ring.SENDS], np.int64),
        axis=1,
        return_inverse=True,
    )
    index = index.reshape(-1)
    waits = np.zeros(keys.shape[1], WAIT)
    waits["communicator"], waits["peer"], waits["sends"] = keys
    is_start = records["what"][at] == ring.STARTED
    waits["steps"] = np.bincount(index[is_start], minlength=len(waits))
    sizes = np.zeros(len(waits), np.uint64)
    moved = np.isin(records["state"][at], (9, 10))  # told when it is sent, and when it is to come
    np.add.at(sizes, index[moved], records["count"][at][moved])
    waits["size_bytes"] = sizes
    for state, name in WAITS.items():
        of_state = records["state"][at] == state
        waits[name] = np.bincount(index[of_state], weights=seconds[of_state], minlength=len(waits))
        if name == "send":
            begun = (host - host.min()) / 1e9
            spans = np.stack([begun, begun + seconds], axis=1)
            for place in range(len(waits)):
                together = union(spans[of_state & (index == place)])
                waits["network"][place] = (together[:, 1] - together[:, 0]).sum()
    return waits

"""The part of a hierarchical all-reduce that happens inside a host, in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ringside.engine.buffers import Flat
from ringside.engine.request import CoreRequest
from ringside.engine.shm.memory import Storage


class HostSlices:
    """Adds up the ranks of a host lane by lane, and spreads the lanes again.

    Args:
        communicator: Of the ranks of this host.
    """

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def reduce_lanes(
        self,
        address: int,
        bounds: Sequence[int],
        dtype: int,
        op: int,
        scale: float,
        own_scale: bool,
        storage: Storage | None,
    ) -> None:
        """Leave in this rank's lane of the elements at an address the fold over the ranks of the host.

        Args:
            address: Of the first element.
            bounds: Element offsets of the lanes, local ranks + 1.
            dtype: Code of the element type.
            op: Code of the reduction.
            scale: Multiplies each contribution first.
            own_scale: Ranks may have different scales.
            storage: The shareable storage the elements lie in, if peers may not have mapped it yet.
        """
        # Lane l of the bounds is local rank l's.
        flat = _flat(address, bounds, dtype)
        call = CoreRequest("reduce_scatter_", flat, flat.numel, bounds, op=op, scale=scale, own_scale=own_scale)
        self._communicator.execute(call, 0, True, storage)

    def reduce_lanes_into(
        self, target: int, address: int, bounds: Sequence[int], dtype: int, op: int, scale: float = 1.0
    ) -> None:
        """Write the fold of this rank's lane to a target; the elements stay; arguments as for `reduce_lanes`."""
        flat = _flat(address, bounds, dtype)
        self._communicator.execute(
            CoreRequest("reduce_scatter", flat, flat.numel, bounds, out=target, op=op, scale=scale), 0, True
        )

    def meet(self) -> None:
        """Return when all ranks of the host have called it."""
        self._communicator.barrier()

    def gather_lanes(self, address: int, bounds: Sequence[int], dtype: int, storage: Storage | None) -> None:
        """Give every rank of the host all lanes; arguments as for `reduce_lanes`."""
        self._communicator.execute(
            CoreRequest("all_gather_", _flat(address, bounds, dtype), bounds[-1], bounds), 0, True, storage
        )

    def prepared(
        self,
        address: int,
        bounds: Sequence[int],
        dtype: int,
        op: int,
        scale: float,
        own_scale: bool = False,
        storage: Storage | None = None,
    ) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return `reduce_lanes` and `gather_lanes` for elements that stay where they are; arguments as for these."""
        flat = _flat(address, bounds, dtype)
        add = CoreRequest("reduce_scatter_", flat, flat.numel, bounds, op=op, scale=scale, own_scale=own_scale)
        spread = CoreRequest("all_gather_", flat, flat.numel, bounds)
        return self._communicator.prepared(add, storage), self._communicator.prepared(spread, storage)

    def absent(self) -> list[int]:
        """Return the local ranks that have not arrived where this one waits; may be called on any thread."""
        return list(self._communicator.absent())

    def abort(self) -> None:
        """Leave at once; the others of the host find out."""
        self._communicator.abort()


def _flat(address: int, bounds: Sequence[int], dtype: int) -> Flat:
    return Flat(address, bounds[-1], dtype, (bounds[-1],), None)

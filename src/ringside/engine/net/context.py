"""What all-reduces between hosts share on one rank: which ranks are where, what they run over, what a spec means there.

`ringside.engine.net.hierarchical.HierarchicalEngine` makes it; it refers to none of those that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.buffers import Flat
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.exchange import Channels, Exchange
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.pipeline import SegmentLayout, lay_out
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import Reduction
from ringside.engine.request import CoreRequest
from ringside.engine.shm.communicator import HostCommunicator
from ringside.engine.transports.base import Bytes
from ringside.errors import UsageError

Step = Callable[[], object]
"""A part of an all-reduce on one rank."""


class NativeAllReduce(Protocol):
    """The process group's own all-reduce."""

    def check(self, dtype: int, op: int) -> None:
        """Raise `UnsupportedError` for what it cannot reduce."""

    def prepare(self, data: Bytes, dtype: int, op: int, members: Sequence[int] | None) -> Step:
        """Return what reduces data (not empty) in place over all ranks, or over the given ones, one per host.

        It raises `LinkError`, and may be called again and again.
        """

    def close(self) -> None:
        """Leave: nothing is under way here; peers that still need this rank find out."""

    def abort(self) -> None:
        """End what is under way, here and at the peers, as far as it can be ended; it may be on any thread."""


class HostSlices:
    """Adds up the ranks of a host lane by lane, and spreads the lanes again.

    Args:
        communicator: Of the ranks of this host.
    """

    def __init__(self, communicator: HostCommunicator) -> None:
        self.communicator = communicator

    def reduce_lanes_into(self, target: int, address: int, bounds: Sequence[int], reduction: Reduction) -> None:
        """Write the fold of this rank's lane to a target; the elements stay; arguments as for `prepared`."""
        flat, op = _flat(address, bounds, reduction.dtype), reduction.fold_op
        call = CoreRequest("reduce_scatter", flat, flat.numel, bounds, out=target, op=op, scale=reduction.scale)
        self.communicator.execute(call, 0, True)

    def gather_lanes(self, address: int, bounds: Sequence[int], dtype: int) -> None:
        """Give every rank of the host all lanes.

        Args:
            address: Of the first element.
            bounds: As for `prepared`.
            dtype: Code of the element type.
        """
        call = CoreRequest("all_gather_", _flat(address, bounds, dtype), bounds[-1], bounds)
        self.communicator.execute(call, 0, True)

    def prepared(self, address: int, bounds: Sequence[int], reduction: Reduction) -> tuple[Step, Step]:
        """Return what adds up the ranks of the host lane by lane, and what gives every rank all lanes: again and again.

        The first leaves in this rank's lane of the elements the fold over the ranks of the host.

        Args:
            address: Of the first element.
            bounds: Element offsets of the lanes, local ranks + 1; lane l is local rank l's.
            reduction: What is done with the elements; an average is only summed.
        """
        flat, own_scale = _flat(address, bounds, reduction.dtype), bool(reduction.scales)
        how: dict[str, Any] = {"op": reduction.fold_op, "scale": reduction.scale, "own_scale": own_scale}
        add = CoreRequest("reduce_scatter_", flat, flat.numel, bounds, **how)
        spread = CoreRequest("all_gather_", flat, flat.numel, bounds)
        prepared = self.communicator.prepared
        return prepared(add, reduction.storage), prepared(spread, reduction.storage)


def _flat(address: int, bounds: Sequence[int], dtype: int) -> Flat:
    return Flat(address, bounds[-1], dtype, (bounds[-1],), None)


@dataclass(frozen=True, slots=True)
class EngineContext:
    """What one rank's all-reduces run over.

    Args:
        rank_map: Which ranks are on which host.
        exchange: Messages to every rank of the group.
        host_slices: Shared memory among the ranks of this host; None for a rank alone on its host.
        native: The group's own all-reduce.
        channels: Exchanges that run beside each other; the first is `exchange`.
        block_bytes: Tensors larger than this go over hosts in blocks of this size.
    """

    rank_map: RankMap
    exchange: Exchange
    host_slices: HostSlices | None
    native: NativeAllReduce
    channels: Channels
    block_bytes: int

    def vertex(self, spec: AlgorithmSpec) -> tuple[int, int]:
        """Return (number of vertices, this one) of a spec's schedule: ranks, or hosts."""
        if spec.over == "ranks":
            return self.rank_map.size, self.rank_map.rank
        return len(self.rank_map.hosts), self.rank_map.host

    def lanes(self, spec: AlgorithmSpec) -> int:
        """Return how many ranks of each host have a lane, a slice of their own between hosts."""
        return 1 if spec.over == "leaders" else self.rank_map.lanes

    def has_lane(self, spec: AlgorithmSpec) -> bool:
        """Tell whether this rank has one."""
        return self.rank_map.local_rank < self.lanes(spec)

    def block_elements(self, dtype: int) -> int:
        """Return how many elements a block has."""
        return max(self.block_bytes // ITEM_BYTES[dtype], 1)

    def checked(self, reduction: Reduction, spec: AlgorithmSpec) -> Reduction:
        """Return the reduction as it travels; raise for one that cannot be done, before anything is sent.

        Raises:
            UsageError, UnsupportedError: It cannot be done that way.
        """
        if reduction.wire is not None and (spec.algorithm == NATIVE or not reduction.is_encoded):
            reduction = replace(reduction, wire=None)
        if spec.algorithm == NATIVE:
            self.native.check(reduction.dtype, reduction.op)
            return reduction
        schedule = spec.schedule(self.vertex(spec)[0])
        # A reducer at the switch is a vertex beyond the ranks.
        if schedule.switches and self.exchange.transport.size == self.rank_map.size:
            raise UsageError(
                f"{spec} needs a reducer at the switch: start `python -m ringside.pytorch.in_network_reducer` there "
                "and make the communicator with switch=True"
            )
        if spec.over == "hosts" and schedule.switches:
            raise UsageError(f"the reducer at the switch takes one slice at a time: leaders/{spec.algorithm}")
        return reduction

    def layout(self, spec: AlgorithmSpec, elements: int, reduction: Reduction) -> SegmentLayout | None:
        """Return the pieces in which a tensor goes over hosts; None: it is small, or cannot be fed in pieces."""
        if spec.over == "ranks" or spec.algorithm == NATIVE:
            return None
        item, lanes = ITEM_BYTES[reduction.dtype], self.lanes(spec)
        least = lanes * self.exchange.segment_of(item, reduction.wire) // item
        plan = plan_messages(spec.schedule(len(self.rank_map.hosts)), self.rank_map.host)
        if plan.switches or not plan.finished or elements < 2 * least:
            return None
        block, ahead = self.block_elements(reduction.dtype), self.exchange.window - 1
        return lay_out(plan, elements, least, block, lanes, self.rank_map.local_size, ahead)

    def message_size(self, spec: AlgorithmSpec, elements: int, reduction: Reduction) -> MessageSize:
        """Return how large the messages are in which a tensor goes over hosts in pieces."""
        item = ITEM_BYTES[reduction.dtype]
        schedule = spec.schedule(len(self.rank_map.hosts))
        return self.exchange.size_of(schedule, elements // self.lanes(spec) * item, item, reduction.wire)

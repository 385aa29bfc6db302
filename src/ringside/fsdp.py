"""FSDP2's collectives without a copy: their buffers are made in memory that the other ranks of the host map.

FSDP2 asks for buffers by official doors, `FSDPModule.set_custom_reduce_scatter` and `set_custom_all_gather`. They are
used again as soon as nobody holds them any more, so peers map each of them once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from ringside.engine.shm.memory import Storage
from ringside.pytorch.process_group.carrier import Carrier, carrier_of
from ringside.pytorch.process_group.collectives import all_gather_shared, reduce_scatter_shared
from ringside.pytorch.shared_storage import empty_shared, storage_of

__all__ = ["SharedAllGather", "SharedReduceScatter"]

_ALONE = 2  # the buffer's own tensor, and the storage that asks


def _is_free(buffer: torch.Tensor) -> bool:
    """Tell whether nobody but its list holds a view of a buffer."""
    return bool(torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) <= _ALONE)


def _place_of(buffer: torch.Tensor, group: dist.ProcessGroup) -> tuple[Carrier, Storage] | None:
    """Return what carries a group's collectives, and where a buffer lies; None: not where it could map that."""
    storage = storage_of(buffer)
    carrier = carrier_of(group) if storage is not None else None
    return None if storage is None or carrier is None else (carrier, storage)


class _SharedBuffers:
    """Makes buffers, and uses them again."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor; FSDP2 calls it before every collective.

        Args:
            size: Its shape.
            dtype: Its element type.
            device: Where; on others than the CPU it is an ordinary tensor.
        """
        if device.type != "cpu":
            return torch.empty(*size, dtype=dtype, device=device)
        numel = math.prod(size)
        known = self._buffers[numel, dtype]
        buffer = next(filter(_is_free, known), None)
        if buffer is None:
            buffer = empty_shared(numel, dtype) if numel else torch.empty(0, dtype=dtype)
            known.append(buffer)
        return buffer.view(*size)


class SharedReduceScatter(_SharedBuffers):
    """What `model.set_custom_reduce_scatter` takes; works on every process group, without copies on one of ours.

    Every `fully_shard`ed module that is to use it is told, with the same object:

        shared = SharedReduceScatter()
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(shared)
    """

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        """Reduce the input over the group and give this rank its part; FSDP2 calls it."""
        place = _place_of(input_tensor, group)
        if place is None:
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, async_op
        return place[0].execute(reduce_scatter_shared, (output_tensor, input_tensor, place[1], options))


class SharedAllGather(_SharedBuffers):
    """What `model.set_custom_all_gather` takes, as `SharedReduceScatter` is what its counterpart takes."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        """Give every rank the inputs of all ranks; FSDP2 calls it, and its input is a part of the output already."""
        place = _place_of(output_tensor, group)
        if place is None:
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)
        options = AllgatherOptions()
        options.asyncOp = async_op
        return place[0].execute(all_gather_shared, (output_tensor, input_tensor, place[1], options))

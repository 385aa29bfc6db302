"""All-reduces of tensors on a GPU: the group's own collective, or a schedule over its point-to-point."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.dtypes import DTYPES, FLOATING, OP_CODES, Op, dtype_code, is_allowed, op_name, own_weight
from ringside.engine.net.exchange.device import DevicePeers
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.runtime.worker import Work
from ringside.engine.transports.gloo_all_reduce import REDUCE_OPS
from ringside.errors import SyncError, UnsupportedError, UsageError
from ringside.schedule import Schedule, chunk_bounds


def on_device(x: Any) -> bool:
    """Tell whether a tensor is on a GPU, and so nothing for shared memory."""
    return isinstance(x, torch.Tensor) and x.is_cuda


class OnDevice:
    """All-reduces tensors that are on a GPU, among the ranks of a process group.

    Args:
        group: The user's.
        choice: The communicator's algorithm; None: the group's own collective, which on NCCL wins.
    """

    def __init__(self, group: dist.ProcessGroup, choice: AlgorithmSpec | None) -> None:
        self._group, self._choice = group, choice
        self._peers = DevicePeers(group)

    def all_reduce(
        self,
        x: torch.Tensor,
        op: Op = "sum",
        async_op: bool = False,
        *,
        scale: float = 1.0,
        algorithm: str | Schedule | None = None,
        weights: float | Sequence[float] | None = None,
    ) -> Any:
        """Reduce a tensor in place; see `ringside.GroupCommunicator.all_reduce`.

        The host waits for nothing that the group's backend does not make it wait for.

        Raises:
            UsageError, UnsupportedError: This call cannot be; nothing was sent.
            SyncError: The group failed.
        """
        # Refuse what cannot be, before anything is sent.
        if x.layout != torch.strided:
            raise UnsupportedError(f"a tensor of layout {x.layout} cannot be reduced: call .to_dense() first")
        op = op_name(op)
        dtype = dtype_code(x.dtype)
        if not is_allowed(dtype, OP_CODES[op]):
            raise UnsupportedError(f"there is no {op} of {DTYPES[dtype]}")
        if weights is not None and (op != "avg" or scale != 1.0):
            raise UsageError(f"weights= is for op='avg' without a scale, not for op={op!r}, scale={scale!r}")
        scaled = scale != 1.0 or weights is not None
        if scaled and (DTYPES[dtype] not in FLOATING or op not in ("sum", "avg")):
            raise UsageError("a scale or weights are for sum and avg of floating dtypes")
        schedule = self._schedule(algorithm)

        flat = x.detach().contiguous().view(-1)
        try:
            if weights is not None:
                # The weights are summed by the group's own collective, whatever the schedule of the tensor.
                own, _ = own_weight(weights, self._peers.rank, self._peers.size)
                total = torch.full((1,), own, dtype=torch.float32, device=flat.device)
                self._reduce(total, "sum", None)
                self._reduce(flat.mul_(own), "sum", schedule)
                flat.div_(total.to(flat.dtype))
            else:
                self._reduce(flat.mul_(scale) if scale != 1.0 else flat, op, schedule)
        except RuntimeError as error:
            algorithm_name = f"by {NATIVE if schedule is None else schedule.name} on {x.device}"
            text = str(error).partition("\n")[0][:300]
            raise SyncError(
                f"all_reduce {algorithm_name}, rank {self._peers.rank} of {self._peers.size}: {text}"
            ) from error
        if flat.data_ptr() != x.data_ptr():
            x.detach().copy_(flat.view(x.shape))
        if not async_op:
            return x
        queued: Future[torch.Tensor] = Future()  # done for the host: what is queued on its stream finds the result
        queued.set_result(x)
        return Work(queued)

    def _schedule(self, algorithm: str | Schedule | None) -> Schedule | None:
        """Return the schedule that the call or the communicator requests; None: the group's own collective."""
        if isinstance(algorithm, Schedule):
            if algorithm.ranks != self._peers.size:
                raise UsageError(f"a schedule of {algorithm.ranks} ranks among {self._peers.size}")
            return algorithm
        choice = AlgorithmSpec.parse(algorithm) if algorithm else self._choice
        if choice is None or choice.algorithm == NATIVE:
            return None
        if choice.over != "ranks":
            raise UsageError(f"{choice} adds up in shared memory, which has no tensors on GPUs: {choice.algorithm}")
        return choice.schedule(self._peers.size)

    def _reduce(self, flat: torch.Tensor, op: str, schedule: Schedule | None) -> None:
        total = "sum" if op == "avg" else op
        if schedule is None:
            dist.all_reduce(flat, REDUCE_OPS[total], group=self._group)
        else:
            bounds = chunk_bounds(flat.numel(), schedule.chunks).tolist()
            chunks = [flat[begin:end] for begin, end in itertools.pairwise(bounds)]
            self._peers.run(plan_messages(schedule, self._peers.rank), chunks, total)
        if op == "avg":
            # Integers are divided as C does, towards zero.
            flat.div_(self._peers.size, rounding_mode=None if flat.is_floating_point() else "trunc")

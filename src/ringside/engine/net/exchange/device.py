"""Schedules on the device where the tensors are: point-to-point of the user's own process group, NCCL's on GPUs.

Round by round of the message plan: what a rank sends and receives in a round goes to the backend as one (as
`batch_isend_irecv` does it), and what has arrived is reduced where it lies. On a GPU the host only queues all this; a
round begins when the stream has come so far. Messages travel as bytes, so that every dtype does. There are no
headers: ranks that call different things are not found out, and errors and timeouts are the group's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringside.engine.net.exchange.plan import MessagePlan, Receive, Send
from ringside.errors import UsageError

Tensor = torch.Tensor
Message = tuple[Callable[[list[Tensor], int, int], Any], Tensor, int]
"""The group's `send` or `recv`, what is sent or received into, and the other rank."""

_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
_TAG = 0
_FOLDED_WIDE = (torch.float16, torch.bfloat16)


class DevicePeers:
    """The ranks of a process group, as those a schedule runs among.

    Args:
        group: The user's group; its backend for the tensors' device carries the messages.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def run(self, plan: MessagePlan, chunks: Sequence[Tensor], op: str) -> None:
        """Run this rank's part of a schedule on the chunks of a tensor, in place.

        Args:
            plan: Its part.
            chunks: [elements of the chunk] each, contiguous, of equal dtype and device; some may be empty.
            op: sum, prod, min, max, band, bor or bxor; halves are folded in float32 and rounded once a round.

        Raises:
            UsageError: The schedule has a switch, which is no rank of the group.
            RuntimeError: What the group raises.
        """
        if plan.switches:
            raise UsageError(f"{plan.schedule.name} reduces at a switch, and on a device only ranks take part")
        sends: defaultdict[int, list[Send]] = defaultdict(list)
        for send in (send for link in plan.links.values() for send in link):
            sends[send.round].append(send)
        for number, receives in enumerate(plan.rounds):
            leaving = {send.chunk for send in sends[number]}
            messages: list[Message] = [
                (self._group.send, chunks[send.chunk], send.dst) for send in sends[number] if chunks[send.chunk].numel()
            ]
            arriving: list[tuple[Receive, list[Tensor]]] = []
            for receive in receives:
                chunk = chunks[receive.chunk]
                if not chunk.numel():
                    continue
                # What replaces a chunk may come straight into it, unless that is being sent in this round.
                straight = receive.overwrite and receive.chunk not in leaving
                buffers = [chunk if straight else torch.empty_like(chunk) for _ in receive.sources]
                messages += [(self._group.recv, data, src) for data, src in zip(buffers, receive.sources, strict=True)]
                if not straight:
                    arriving.append((receive, buffers))
            if messages:
                self._exchange(messages)
            for receive, buffers in arriving:
                chunk = chunks[receive.chunk]
                if receive.overwrite:
                    chunk.copy_(buffers[0])
                    continue
                # In the order of ranks, so that all that reduce the same contributions get the same bits.
                parts = [*zip(receive.sources, buffers, strict=True), (self.rank, chunk)]
                parts.sort(key=lambda part: part[0])
                chunk.copy_(_fold([data for _, data in parts], op))

    def _exchange(self, messages: list[Message]) -> None:
        """Send and receive all at once; NCCL would wait for one after the other, and two ranks for each other."""
        device = messages[0][1].device
        group: Any = self._group
        # Before torch 2.7 backends do not report it; there NCCL's could.
        together = getattr(group._get_backend(device), "supports_coalescing", device.type == "cuda")
        if together:
            group._start_coalescing(device)
        works = [call([tensor.view(torch.uint8)], peer, _TAG) for call, tensor, peer in messages]
        if together:
            works = [group._end_coalescing(device)]
        for work in works:
            work.wait()  # on a GPU the stream waits, not this thread


def _fold(parts: Sequence[Tensor], op: str) -> Tensor:
    """Return the reduction of tensors in their order; of halves in float32."""
    wide = parts[0].dtype in _FOLDED_WIDE
    total = parts[0].float() if wide else parts[0]
    for part in parts[1:]:
        total = _COMBINE[op](total, part.float() if wide else part)
    return total

"""All-to-all of parts whose sizes differ, in blocks of equal size: nobody needs more room than a block per rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringside.errors import MismatchError

BLOCK_BYTES = 1 << 20


def exchange(comm: Any, gives: Sequence[torch.Tensor], takes: Sequence[torch.Tensor]) -> None:
    """Give part j to rank j, and take what every rank has for this one.

    Args:
        comm: The communicator.
        gives: A flat tensor per rank.
        takes: A flat tensor per rank, of the same dtype, to write into.

    Raises:
        MismatchError: Two ranks do not mean the same sizes; on all ranks alike, before anything is sent.
    """
    longest = _agree(comm, [x.numel() for x in gives], [x.numel() for x in takes])
    block = min(longest, max(BLOCK_BYTES // gives[0].element_size(), 1))
    there, back = gives[0].new_empty(2, comm.size, block)
    for at in range(0, longest, max(block, 1)):
        for row, give in zip(there, gives, strict=True):
            part = give[at : at + block]
            row[: part.numel()] = part
        comm.all_to_all(there, out=back)
        for row, take in zip(back, takes, strict=True):
            part = take[at : at + block]
            part.copy_(row[: part.numel()])


def _agree(comm: Any, gives: list[int], takes: list[int]) -> int:
    """Return the size of the largest part there is, in elements."""
    sizes = comm.all_gather(torch.tensor([[gives, takes]])).tolist()
    for giver in range(comm.size):
        for taker in range(comm.size):
            given, taken = sizes[giver][0][taker], sizes[taker][1][giver]
            if given != taken:
                raise MismatchError(
                    f"all_to_all: rank {giver} gives {given} elements to rank {taker}, which expects {taken}: "
                    "make the splits of both alike",
                    [giver, taker],
                )
    return max(int(size) for row in sizes for size in row[0])

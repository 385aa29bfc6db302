"""Collectives besides all-reduce as a rank of the lab calls them: ours, ours over all ranks as if alone, and Gloo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Call = Callable[[], Any]
COLLECTIVES = ("reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
WAYS = ("gloo", "ranks", "ours")


def call_of(name: str, comm: Any, group: Any, array: np.ndarray[Any, Any]) -> Call:
    """Return what carries out a collective once.

    Args:
        name: `COLLECTIVE:WAY`; `ranks` is ours without shared memory inside the hosts.
        comm: Ours.
        group: The process group.
        array: float32 [all ranks' elements]: a reduce-scatter's input, an all-gather's result, what is broadcast.
    """
    import torch
    import torch.distributed as dist

    from ringside.engine.net import hierarchical_collectives

    collective, side = name.split(":")
    part = np.zeros(len(array) // comm.size, dtype=np.float32)
    if side == "gloo":
        whole, own = torch.from_numpy(array), torch.from_numpy(part)
        stock = {
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, own, group=group),
            "broadcast": lambda: dist.broadcast(whole, 0, group=group),
            "reduce": lambda: dist.reduce(whole, 0, group=group),
            "barrier": lambda: dist.barrier(group),
        }
        return stock[collective]
    ours = {
        "reduce_scatter": lambda: comm.reduce_scatter(array, out=part),
        "all_gather": lambda: comm.all_gather(part, out=array),
        "broadcast": lambda: comm.broadcast(array),
        "reduce": lambda: comm.reduce(array),
        "barrier": comm.barrier,
    }
    call = ours[collective]
    if side == "ours":
        return call

    def over_ranks() -> None:
        """Every rank counts as a host of its own: nothing is registered that goes through shared memory."""
        kept = dict(hierarchical_collectives.BY_KIND)
        hierarchical_collectives.BY_KIND.clear()
        try:
            call()
        finally:
            hierarchical_collectives.BY_KIND.update(kept)

    return over_ranks

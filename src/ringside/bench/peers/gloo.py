"""Stock Gloo: `torch.distributed.all_reduce` on a private tensor, and nothing else."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ringside.bench.peers.contender import Contender
from ringside.bench.peers.torch_tensors import as_torch

TIMEOUT = timedelta(minutes=5)
OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def open_gloo(rank: int, ranks: int, dtype: str, op: str, directory: Path) -> Contender:
    """Join the ranks' Gloo group; `directory` is shared by them and by nobody else."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/gloo-store", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    call = dist.all_reduce if op == "sum" else partial(dist.all_reduce, op=OPS[op])
    return Contender("gloo", "private", lambda array: as_torch(array, dtype), call, close=dist.destroy_process_group)

"""Jobs of a few ranks under a backend of torch.distributed by name: ours and the one it stands in for."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from tests.support.ranks import on_ranks, place

import ringside  # noqa: F401 - makes the backend known

from .groups import meeting_point

if not hasattr(dist.ProcessGroup, "_set_default_backend"):
    pytest.skip("refused in one line: the process group needs torch 2.7", allow_module_level=True)
OF_TODAY = pytest.mark.skipif(
    not hasattr(dist.AllreduceOptions, "asyncOp"),
    reason="up to torch 2.7 Gloo, options of calls and FSDP2 on CPUs have less to compare with",
)
LIMIT_S = 150.0  # the first call of a job imports a good part of torch


@contextlib.contextmanager
def backend(path: str, name: str = "ringside", timeout_s: float = LIMIT_S / 2) -> Iterator[int]:
    """Inside, all ranks of the call are in the default process group; yields the rank."""
    here = place()
    store = dist.PrefixStore(f"{here.job}/{name}", dist.FileStore(path, -1))
    limit = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(name, store=store, rank=here.rank, world_size=here.size, timeout=limit)
    try:
        yield here.rank
    finally:
        dist.destroy_process_group()


def under(path: str, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run `function(rank, *args)` on this rank inside a default process group of a backend."""
    with backend(path, name) as rank:
        return function(rank, *args)


def on_both(size: int, function: Callable[..., Any], *args: Any) -> tuple[list[Any], list[Any]]:
    """Run `function(rank, *args)` on all ranks under ringside, then under Gloo; return what each rank returned."""
    with meeting_point() as path:
        ours = on_ranks(size, under, path, "ringside", function, *args, limit_s=LIMIT_S)
        theirs = on_ranks(size, under, path, "gloo", function, *args, limit_s=LIMIT_S)
    return ours, theirs


def on_ours(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(rank, *args)` on all ranks under ringside; return what each rank returned."""
    with meeting_point() as path:
        results: list[Any] = on_ranks(size, under, path, "ringside", function, *args, limit_s=LIMIT_S)
        return results

"""Every way to wait for a collective of the process group, and what ranks do that wait."""

from __future__ import annotations

import datetime
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from tests.support.ranks import hear, say
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringside.errors import DeadlineError

from .process_groups import backend


def at_once() -> None:
    dist.all_reduce(torch.ones(3))


def later() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).wait()


def by_future() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()


def by_result() -> None:
    dist.all_reduce(torch.ones(3), async_op=True).result()


def functionally() -> None:
    functional.wait_tensor(functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD))


def coalesced() -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(3))
    manager.wait()


def by_objects() -> None:
    dist.all_gather_object([None] * dist.get_world_size(), "text")


def in_backward(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    def way() -> None:
        model = wrap(nn.Linear(4, 4))
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()

    return way


def wrapped_in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


WAYS: dict[str, Callable[[], None]] = {
    **{way.__name__: way for way in (at_once, later, by_future, by_result, functionally, coalesced, by_objects)},
    "ddp": in_backward(wrapped_in_ddp),
    "fsdp": in_backward(fully_shard),
}


def caught(way: Callable[[], None]) -> tuple[str, str]:
    """Return the name and the text of the exception that a way to wait ends with."""
    try:
        way()
    except RuntimeError as error:  # whatever torch code expects of its own groups
        return type(error).__name__, str(error)
    return "", ""


def patient(rank: int) -> None:
    """Wait for too short a time, then for long enough."""
    if rank == 1:
        hear()
        dist.all_reduce(torch.ones(2))
        return
    work = dist.all_reduce(x := torch.ones(2), async_op=True)
    with pytest.raises(DeadlineError, match=r"all_reduce on rank 0: Operation timed out! It is not done after 0\.01 s"):
        work.wait(datetime.timedelta(milliseconds=10))
    assert not work.is_completed()
    say("ready")
    assert work.wait()
    assert x[0].item() == 2


def patient_in_group(path: str) -> None:
    with backend(path) as rank:
        patient(rank)


def ready_and(way: Callable[[], None]) -> None:
    say("ready")
    way()


INTERRUPTED = (later, by_result, functionally, at_once)


def interrupted(path: str) -> str:
    """Be interrupted while waiting for rank 1, in a group for each way to wait: none can be used afterwards."""
    with backend(path) as rank:
        groups = [dist.new_group([0, 1]) for _ in INTERRUPTED]
        if rank == 1:
            hear()
            return ""
        world = dist.group.WORLD
        for way, group in zip(INTERRUPTED, groups, strict=True):
            dist.group.WORLD = group
            with pytest.raises(KeyboardInterrupt):
                ready_and(way)
            group.abort()  # rank 1 never comes
        dist.group.WORLD = world
        return "went on"

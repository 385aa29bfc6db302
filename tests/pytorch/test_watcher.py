"""DDP only watched: no communication hook, callbacks around DDP's own, and nothing left behind."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import ringside  # noqa: E402
from ringside.monitor.step_clock import SyncTimes  # noqa: E402
from ringside.monitor.wait_meter import WaitMeter, WatchedGroup  # noqa: E402
from ringside.pytorch.ddp.attached_model import attachment_of, backward_of, own_hook  # noqa: E402
from ringside.pytorch.ddp.watcher import BackwardWatch  # noqa: E402

from .training import Branches, Said, mlp  # noqa: E402


@pytest.fixture
def alone() -> Iterator[None]:
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Events:
    """A step clock that notes what it is told, and whether DDP had ended its backward by then."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model, self.seen, self.times = model, list[str](), list[SyncTimes]()
        self.always_synced, self.groups, self.step = False, None, 0

    def is_final(self) -> bool:
        try:
            self.model.reducer._check_reducer_finalized()
        except RuntimeError:
            return False
        return True

    def backward_ends(self) -> None:
        self.seen.append("no work left" if not self.is_final() else "too late")

    def sync_ends(self, take: Any, ago: float = 0.0) -> None:
        self.seen.append("synchronised" if self.is_final() else "too early")
        self.times.append(take()())

    def pop(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


ONCE = ["no work left", "synchronised"]


def watched(model: nn.Module, **options: Any) -> tuple[DistributedDataParallel, BackwardWatch, Events]:
    ddp = DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **options})
    ringside.attach(ddp, engine="native", monitor=False)
    watch: Any = backward_of(ddp)
    assert isinstance(watch, BackwardWatch)
    watch.clock = events = Events(ddp)
    return ddp, watch, events


def backward(ddp: DistributedDataParallel) -> None:
    ddp(torch.randn(4, 64)).square().mean().backward()


# ------------------------------------------------------------------------------------------------ order


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
def test_ddp_waits_between_the_two_callbacks(alone: None, options: dict[str, bool]) -> None:
    ddp, watch, events = watched(mlp(), **options)
    assert own_hook(ddp) is None
    assert not ddp._comm_hooks
    for _ in range(5):
        backward(ddp)
        assert events.pop() == ONCE
    assert watch.backwards == 5
    assert [sum(p.numel() * 4 for p in ddp.parameters())] * 5 == [each.payload_bytes for each in events.times]
    assert events.times[-1].collectives > 1
    assert watch.counters == {"gloo": sum(each.collectives for each in events.times)}


def test_what_only_a_hook_sees_is_not_known(alone: None) -> None:
    ddp, _, events = watched(mlp())
    backward(ddp)
    (times,) = events.times
    assert all(map(math.isnan, (times.sync_seconds, times.wire_seconds, times.wait_seconds, times.busy_seconds)))


def test_a_first_delayed_backward_is_seen_too(alone: None) -> None:
    ddp, watch, events = watched(mlp(), static_graph=True)
    for number in range(4):
        backward(ddp)
        # In the first one DDP hands over all buckets in the callback in which it waits.
        assert events.pop() == (ONCE if number else ["too late", "synchronised"])
    assert watch.backwards == 4


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_first_parameter_may_be_unused(alone: None, side: str) -> None:
    model: Any = nn.ModuleDict({"unused": nn.Linear(4, 4), "used": Branches()})
    model.forward = lambda x: {"a": [model["used"](x)]}
    model["used"].use = side
    ddp, _, events = watched(model, find_unused_parameters=True)
    for _ in range(3):
        ddp(torch.randn(4, 64))["a"][0].sum().backward()
        assert events.pop() == ONCE


def test_outputs_of_any_type_will_do(alone: None) -> None:
    class Odd:
        def __init__(self, loss: torch.Tensor) -> None:
            self.loss = loss

    model = mlp()
    forward = model.forward
    model.forward = lambda x: Odd(forward(x).sum())  # type: ignore[method-assign]
    ddp, _, events = watched(model)
    for _ in range(3):
        ddp(torch.randn(4, 64)).loss.backward()
        assert events.pop() == ONCE


# ------------------------------------------------------------------------------------------------ odd backwards


def test_accumulation_is_one_synchronisation(alone: None) -> None:
    ddp, watch, events = watched(mlp())
    for _ in range(3):
        with ddp.no_sync():
            backward(ddp)
            backward(ddp)
        assert events.pop() == []
        backward(ddp)
        assert events.pop() == ONCE
    assert watch.backwards == 3


def test_passes_without_a_backward_of_their_own(alone: None) -> None:
    ddp, watch, events = watched(mlp())
    x = torch.randn(4, 64)
    with torch.no_grad():
        ddp(x)
    ddp.module(x).sum().backward()  # past DDP: nothing is reduced
    assert events.pop() == []
    ddp(x)  # its output is dropped
    (ddp(x) + ddp(x)).sum().backward()  # one backward of two forward passes
    assert events.pop() == ONCE
    output = ddp(x)
    output.sum().backward(retain_graph=True)
    output.sum().backward()  # DDP reduces only once
    assert events.pop() == ONCE
    assert watch.backwards == 2


def test_a_model_without_a_gradient_in_this_step(alone: None) -> None:
    first, second = watched(mlp()), watched(mlp())
    for _ in range(2):
        backward(first[0])
        assert (first[2].pop(), second[2].pop()) == (ONCE, [])
        (first[0](torch.randn(4, 64)) + second[0](torch.randn(4, 64))).sum().backward()
        assert (first[2].pop(), second[2].pop()) == (ONCE, ONCE)


def test_a_backward_that_is_broken_off_counts_as_none(alone: None) -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            raise ValueError("in the middle")

    parts = [nn.Linear(64, 64), nn.Linear(64, 8)]
    ddp, watch, events = watched(nn.Sequential(*parts), find_unused_parameters=True)
    handle = parts[0].register_forward_hook(lambda _, args, output: Breaks.apply(output))
    with pytest.raises(ValueError, match="in the middle"):
        backward(ddp)
    handle.remove()
    assert events.pop() == []
    ddp.reducer._reset_state()
    backward(ddp)
    assert events.pop() == ONCE
    assert watch.backwards == 1


class Checkpointed(nn.Module):
    """Backward runs backwards of its own inside; `outside` layers at the beginning are in the outer one."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.outside = outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x) if self.outside else checkpoint(self.parts[0], x.requires_grad_(), use_reentrant=True)
        for part in self.parts[1:]:
            x = checkpoint(part, x.relu(), use_reentrant=True)
        return x


@pytest.mark.parametrize("outside", [True, False])
def test_reentrant_checkpoints_end_in_one_synchronisation(alone: None, outside: bool) -> None:
    ddp, watch, events = watched(Checkpointed(outside))
    for _ in range(3):
        backward(ddp)
        assert events.pop() == ONCE
    assert watch.backwards == 3


def test_where_the_last_gradient_comes_in_another_backward_the_wait_is_not_guessed(alone: None) -> None:
    class LastOutside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inside, self.outside(x), use_reentrant=True)

    with Said() as said:
        ddp, watch, events = watched(LastOutside())
        for _ in range(3):
            backward(ddp)
        assert "synchronised" not in events.pop()
    assert events.always_synced, "steps are recorded all the same"
    assert watch.backwards == 0
    assert len(said.about("is not seen")) == 1


def test_compiled_models(alone: None) -> None:
    ddp, _, events = watched(mlp(), bucket_cap_mb=1)
    model = torch.compile(ddp, backend="aot_eager")
    for _ in range(3):
        model(torch.randn(4, 64)).square().mean().backward()
        assert events.pop() == ONCE


# ------------------------------------------------------------------------------------------------ others' hooks


def test_a_hook_of_the_scripts_is_ddps_own_affair(alone: None) -> None:
    ddp, watch, events = watched(mlp())
    ddp.register_comm_hook(None, fp16_compress_hook)
    backward(ddp)
    assert events.pop() == ONCE
    assert watch.has_user_hook
    assert set(watch.counters) == {"hook:fp16_compress_hook"}
    attachment = attachment_of(ddp)
    assert attachment is not None
    assert "fp16_compress_hook" in attachment.why
    attachment.detach()
    later = ringside.attach(ddp, monitor=False)
    backward(ddp)
    assert set(later.counters) == {"hook:fp16_compress_hook"}


# ------------------------------------------------------------------------------------------------ groups that tell


def test_in_a_watched_group_the_buckets_are_the_groups(alone: None) -> None:
    ddp, watch, events = watched(mlp())
    name = ddp.process_group.group_name
    events.groups = meter = WaitMeter(0, lambda *_: pytest.fail("the clock knows of this wait"))  # type: ignore[assignment]
    meter.add(WatchedGroup(name, "", lambda: [0]))
    earlier = meter.issue(name, -1, 8)
    last = list(ddp.parameters())[-1]  # whose gradient comes first
    last.register_hook(lambda _: meter.issue(name, -1, 100) and None)
    backward(ddp)
    assert events.pop() == ONCE
    assert (events.times[0].payload_bytes, events.times[0].collectives) == (0, 0)
    assert earlier is not None
    assert not earlier.is_waited_for
    (use,) = meter.end_step()().uses
    assert (use.count, use.size_bytes) == (2, 108)
    assert use.blocked_seconds > 0
    assert watch.counters["gloo"] >= 1


# ------------------------------------------------------------------------------------------------ nothing is left


def test_detached_nothing_is_told_any_more(alone: None) -> None:
    ddp, watch, events = watched(mlp())
    backward(ddp)
    output = ddp(torch.randn(4, 64))
    attachment = attachment_of(ddp)
    assert attachment is not None
    attachment.detach()
    output.sum().backward()
    backward(ddp)
    assert events.pop() == ONCE  # the first one
    assert watch.backwards == 1
    again = ringside.attach(ddp, engine="native", monitor=False)
    backward(ddp)
    assert set(again.counters) == {"gloo"}
    node = torch.autograd.graph.get_gradient_edge(next(ddp.parameters())).node
    again.detach()
    handle = node.register_prehook(lambda *_: None)
    assert len(handle.hooks_dict_ref()) == 1, "ours are gone"
    handle.remove()


def test_a_model_can_be_freed(alone: None) -> None:
    ddp, watch, events = watched(mlp())
    backward(ddp)
    del events.model
    parameter = weakref.ref(next(ddp.parameters()))
    del ddp
    gc.collect()
    assert parameter() is None
    assert watch.backwards == 1, "it is not what the watch hangs on"

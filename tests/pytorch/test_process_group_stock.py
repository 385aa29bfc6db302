"""Parts of torch that look at backends by name, or into them, take groups of ours as they take Gloo's."""

from __future__ import annotations

import datetime
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch._C._distributed_c10d import BuiltinCommHookType  # noqa: E402
from torch.distributed import fsdp as torch_fsdp  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from ringside.pytorch import carried  # noqa: E402
from ringside.pytorch.process_group import creation  # noqa: E402
from ringside.pytorch.process_group.carrier import carrier_of  # noqa: E402

from .process_groups import OF_TODAY, on_both, on_ours  # noqa: E402
from .training import same_bits  # noqa: E402

pytestmark = pytest.mark.native

Tensors = list[torch.Tensor]


# ------------------------------------------------------------------------------------------------ torch.compile


def waited_for_later(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x + 1
    work.wait()
    return y + z


def all_kinds(x: torch.Tensor) -> torch.Tensor:
    size = dist.get_world_size()
    whole, part = torch.empty(2 * size), torch.empty(2)
    dist.all_gather_into_tensor(whole, x[:2] + 1)
    dist.reduce_scatter_tensor(part, whole)
    dist.barrier()
    dist.broadcast(part, 0)
    rows = [torch.empty(2) for _ in range(size)]
    dist.all_gather(rows, part)
    return torch.cat(rows) * whole.sum()


def between_two(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    if dist.get_rank() == 0:
        dist.send(y, 1)
    else:
        dist.recv(y, 0)
    return y + 1


def trained(model: nn.Module) -> Tensors:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 16)).square().mean().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def compiled(rank: int) -> dict[str, Tensors]:
    """Compile code that calls collectives where torch.compile has no operator for them, so that its graphs break."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    results = {}
    for function in (waited_for_later, all_kinds, between_two):
        results[function.__name__] = [torch.compile(function, backend="aot_eager")(torch.ones(3) + rank)]
    results["ddp"] = trained(torch.compile(DistributedDataParallel(mlp()), backend="aot_eager"))
    results["fsdp2"] = trained(torch.compile(torch_fsdp.fully_shard(mlp()), backend="aot_eager"))
    if dist.get_backend() == "ringside":
        assert set(carried().get("gloo", ())) == {("send", "recv")[rank]}
    return results


@OF_TODAY
def test_compiled_code_whose_graphs_break_at_collectives_runs_as_on_gloo():
    ours, theirs = on_both(2, compiled)
    for mine, gloo in zip(ours, theirs, strict=True):
        for name, tensors in gloo.items():
            assert all(same_bits(*pair) for pair in zip(mine[name], tensors, strict=True)), name


# ------------------------------------------------------------------------------------------------ by name


def built_in(rank: int, kind: Any) -> Tensors:
    model = DistributedDataParallel(mlp())
    model._register_builtin_comm_hook(kind)
    return trained(model)


@pytest.mark.parametrize("kind", [BuiltinCommHookType.ALLREDUCE, BuiltinCommHookType.FP16_COMPRESS])
def test_the_hooks_that_torch_has_in_cpp(kind):
    ours, theirs = on_both(2, built_in, kind)
    for mine, gloo in zip(ours, theirs, strict=True):
        assert all(same_bits(*pair) for pair in zip(mine, gloo, strict=True))


def by_name(rank: int) -> list[str]:
    """Use what asks for a backend's name, on a group of ours and on one of Gloo's beside it."""
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier()
    dist.monitored_barrier(gloo)
    setting: Callable[..., None] = dist.distributed_c10d._set_pg_timeout
    for group in (None, gloo):
        setting(datetime.timedelta(seconds=40), group)
    x = torch.ones(2)
    for group in (None, gloo):
        dist.all_reduce(x, group=group)
    model = DistributedDataParallel(mlp(), process_group=gloo)
    model._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)
    trained(model)
    return [str(x.tolist()), repr(carrier_of(dist.group.WORLD).limit_s)]


def test_groups_of_other_backends_are_asked_as_before():
    assert on_ours(2, by_name) == [["[4.0, 4.0]", "40.0"]] * 2


def test_what_torch_has_in_other_ways_is_left_as_it_is_and_that_is_said(caplog):
    class OtherDDP:
        def _ddp_init_helper(self, parameters, buckets): ...

    stock = OtherDDP._ddp_init_helper
    creation.change_ddp(types.SimpleNamespace(DistributedDataParallel=OtherDDP))
    assert vars(OtherDDP)["_ddp_init_helper"] is stock
    assert not hasattr(OtherDDP, "_register_builtin_comm_hook")
    names = ["_register_builtin_comm_hook", "_ddp_init_helper"]
    words = f"of torch {torch.__version__} is not the one that ringside knows: it stays as it is"
    assert [record.getMessage() for record in caplog.records] == [f"{name} {words}" for name in names]

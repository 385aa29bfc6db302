"""What stands on torch.distributed runs on the process group as it runs on Gloo, and nothing of it falls through."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402

if not hasattr(dist.ProcessGroup, "_set_default_backend"):
    pytest.skip("refused in one line: the process group needs torch 2.7", allow_module_level=True)
import torch.distributed._functional_collectives as functional  # noqa: E402
from tests.support.collective_log import drain  # noqa: E402
from tests.support.ranks import on_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.engine.shm.log import PATHS  # noqa: E402
from ringside.fsdp import SharedAllGather, SharedReduceScatter  # noqa: E402
from ringside.pytorch import carried  # noqa: E402
from ringside.pytorch.process_group.carrier import carrier_of  # noqa: E402

from .groups import meeting_point  # noqa: E402
from .process_groups import LIMIT_S, OF_TODAY, on_both  # noqa: E402
from .training import same_bits  # noqa: E402

pytestmark = pytest.mark.native

Tensors = list[torch.Tensor]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model: nn.Module, optimizer: Any = None, steps: int = 4, seed: int | None = None) -> Tensors:
    """Train a few steps on this rank's own data; return whole parameters."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank() if seed is None else seed)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 16)).square().mean().backward()
        optimizer.step()
    return whole(model)


def whole(model: nn.Module) -> Tensors:
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


def ddp(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(mlp(), bucket_cap_mb=0.001, **options)


def plain_ddp() -> Tensors:
    return train(ddp(gradient_as_bucket_view=True))


def large_ddp() -> Tensors:
    """Buckets so large that they are worth mapping: from the third step on they are summed where they lie."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 512), nn.Linear(512, 4)))
    parameters = train(model, steps=6)
    if dist.get_backend() == "ringside":
        rows = drain(carrier_of(dist.group.WORLD).engine.inside.log.core)
        assert sum(PATHS[row.path] == "push" for row in rows) >= 3, rows
    return parameters


def attached_ddp() -> Tensors:
    model = ddp()
    if dist.get_backend() == "gloo":
        return train(model)
    attachment = ringside.attach(model, monitor=False)
    parameters = train(model)
    assert attachment.engine == "ringside"
    attachment.detach()
    return parameters


def uneven_inputs() -> Tensors:
    model = ddp()
    with Join([model]):
        train(model, steps=2 + dist.get_rank())
    return whole(model)


def zero_redundancy() -> Tensors:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import warns of torch.jit

    model = ddp()
    return train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def compressed() -> Tensors:
    model = ddp()
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


def local_sgd() -> Tensors:
    model = ddp()
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 2)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    return train(model)


def sparse_gradients() -> Tensors:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(24, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 20, (4, 3))).sum().backward()
        optimizer.step()
    return whole(model)


def fsdp2() -> Tensors:
    model = mlp()
    for layer in list(model)[::2]:
        fully_shard(layer)
    return train(fully_shard(model))


def fsdp2_shared() -> Tensors:
    """The same with the reduce-scatter's input and the all-gather's output where the others can read them."""
    model, shared, gathered = mlp(), SharedReduceScatter(), SharedAllGather()
    for module in (*model[::2], model):
        fully_shard(module)
        module.set_custom_reduce_scatter(shared)
        module.set_custom_all_gather(gathered)
    parameters = train(model)
    if dist.get_backend() == "ringside":
        counts = carried()["ringside"]
        assert counts["reduce_scatter_shared"] == 4 * 3
        assert counts["all_gather_shared"] >= 4 * 3 * 1.5, "in backward once more, but for what stays"
        for buffers in (*shared._buffers.values(), *gathered._buffers.values()):
            assert len(buffers) <= 3, "FSDP2 holds one or two while it fills another"
    return parameters


def fsdp1() -> Tensors:
    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    train(model)
    with FullyShardedDataParallel.summon_full_params(model):
        return whole(model)


def tensor_parallel() -> Tensors:
    model = mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return train(parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), seed=3)


def dtensor() -> Tensors:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(1)
    x, results = torch.randn(10, 6), []
    for placement in (Shard(0), Shard(1), Replicate()):
        there = distribute_tensor(x, mesh, [placement])
        results += [there.redistribute(mesh, [other]).full_tensor() for other in (Shard(0), Shard(1), Replicate())]
    partial = DTensor.from_local(torch.full((3, 3), float(dist.get_rank())), mesh, [Partial()])
    return [*results, partial.full_tensor(), partial.redistribute(mesh, [Shard(0)]).full_tensor()]


def chain(x: torch.Tensor) -> torch.Tensor:
    """Functional collectives, one after the other."""
    group = dist.group.WORLD
    summed = functional.all_reduce(x, "sum", group)
    gathered = functional.all_gather_tensor(summed * 2, 0, group)
    mean = functional.reduce_scatter_tensor(gathered, "avg", 0, group)
    dealt = functional.all_to_all_single(gathered, None, None, group)
    return functional.wait_tensor(functional.broadcast(dealt, 0, group)).sum() + functional.wait_tensor(mean).sum()


def in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    dist.all_reduce(y)
    return y * 2


def compiled() -> Tensors:
    torch._dynamo.reset()
    x = torch.arange(8.0) + dist.get_rank()
    results = [chain(x)]
    for function in (chain, in_place):
        results.append(torch.compile(function, backend="aot_eager", fullgraph=True)(x))
    assert same_bits(*results[:2])
    return results


JOBS: tuple[Callable[[], Tensors], ...] = (
    plain_ddp,
    large_ddp,
    attached_ddp,
    uneven_inputs,
    zero_redundancy,
    compressed,
    local_sgd,
    sparse_gradients,
    fsdp2,
    fsdp2_shared,
    fsdp1,
    tensor_parallel,
    dtensor,
    compiled,
)


def all_jobs(rank: int) -> tuple[dict[str, Tensors], dict[str, Any]]:
    torch.sparse.check_sparse_tensor_invariants.disable()
    warnings.simplefilter("ignore")
    results = {job.__name__: job() for job in JOBS}
    return results, carried() if dist.get_backend() == "ringside" else {}


@OF_TODAY
def test_two_ranks_train_to_the_bit_as_on_gloo():
    ours, theirs = on_both(2, all_jobs)
    for (mine, engines), (gloo, _) in zip(ours, theirs, strict=True):
        for name, tensors in gloo.items():
            wrong = [at for at, pair in enumerate(zip(mine[name], tensors, strict=True)) if not same_bits(*pair)]
            assert not wrong, f"{name}: tensors {wrong} differ"
        assert set(engines) == {"ringside"}


def meshes(rank: int) -> list[Tensors]:
    """Hybrid sharding, and data x tensor parallelism, on 2 x 2 ranks."""
    warnings.simplefilter("ignore")
    hybrid = fully_shard(mlp(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    results = [train(hybrid)]
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")), mlp()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    results.append(train(fully_shard(model, mesh=mesh["data"]), seed=rank // 2))
    if dist.get_backend() == "ringside":  # Gloo stands still: the hook waits on Gloo's own thread
        model = ddp()
        state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.1)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        norms = torch.stack([p.norm() for p in train(model, steps=5)])
        agreed = norms.clone()
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        assert torch.equal(norms, agreed)
        groups = [each for each in dist.distributed_c10d._world.pg_map if dist.get_rank(each) >= 0]
        assert not any("gloo" in carried(group) for group in groups)
    return results


@OF_TODAY
def test_meshes_of_four_ranks_train_as_on_gloo():
    ours, theirs = on_both(4, meshes)
    for mine, gloo in zip(ours, theirs, strict=True):
        for a, b in zip(mine, gloo, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


SCRIPT = Path(__file__).with_name("user_script.py")


def run_as_main(backend: str, store: str) -> list[str]:
    """Run the script as `python user_script.py` would, and return what it printed."""
    os.environ["BACKEND"], os.environ["STORE"] = backend, store
    warnings.simplefilter("ignore")
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return said.getvalue().splitlines()


def test_a_users_script_prints_the_same_under_both():
    with meeting_point() as path:
        stores = {name: f"{path}.{name}" for name in ("ringside", "gloo")}
        ours, theirs = (on_ranks(2, run_as_main, name, store, limit_s=LIMIT_S) for name, store in stores.items())
    assert ours == theirs
    assert "accuracy" in ours[0][0]
    assert ours[0][-1] == ours[1][-1]
    assert len(ours[0][-1]) == 64

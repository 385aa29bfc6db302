"""The process group "ringside" beside Gloo: the same code on groups of the same ranks, in turn.

Small all-reduces as tensor parallelism makes them (plain, and functional as DTensor calls them), a tensor-parallel
layer, a DistributedDataParallel step and an FSDP2 step of a 25-million-parameter MLP. Blocks alternate between the
groups, so that all meet the same weather; the time of a block is that of its slowest rank. A third group ("fake",
torch's own for tests) does nothing at all: its time is what torch alone takes. Prints, per job:

    gloo, ringside, torch   median time of a step; `torch` that of the group that does nothing
    ratio                   median of Gloo's time over ours, pair by pair, with quartiles
    bound                   Gloo's time over torch's: the ratio of a backend that takes no time at all
    net                     the ratio of what is left of both times without torch's
    floor                   what was asked for; `out of reach` where the bound of this run is below it

On one host, or with `--lab 2x2` on hosts of the network lab (needs privilege; hosts x ranks, links of `--rate`).

    python -m bench.allreduce.process_group [--ranks 2] [--blocks 9] [--only fsdp2,ddp] [--width 2048]
                                            [--lab 2x2] [--json]
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.common import make_parser, process_group, run_own_ranks, slowest_step_s

MODULE = "bench.allreduce.process_group"
SIDES = ("gloo", "ringside", "fake")
COLUMNS = f"{'ms a step':22} {'gloo':>9} {'ringside':>9} {'torch':>9}   {'ratio':24} {'bound':>7} {'net':>7}   floor"
UNFIT = {("ddp", "fake")}  # DDP's C++ wants the tensors of a future, and those of "fake" hold none
LAYERS, WIDTH, BATCH = 6, 2048, 16
SMALL = ("all_reduce 4 KB", "all_reduce 64 KB", "functional 4 KB", "functional 64 KB")
# Gloo's time over ours, at least.
FLOORS = {"fsdp2": 1.3, "fsdp2 shared": 1.3, "fsdp2 shared, gathers": 1.3, **dict.fromkeys(SMALL, 10.0)}
LAB_S = 340.0  # for a job in the lab to end
Step = Callable[[], Any]


def main() -> int:
    """Start the ranks and print what rank 0 found; the exit status is 1 where a floor on one host was missed."""
    parser = make_parser(MODULE, __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--blocks", type=int, default=9, help="blocks of each job on each group (default: 9)")
    parser.add_argument("--only", default="", help="jobs whose names begin so, by commas (default: all)")
    parser.add_argument("--width", type=int, default=WIDTH, help="of the MLP's six layers (default: 2048: 25 million)")
    parser.add_argument("--lab", metavar="HOSTSxRANKS", help="on hosts of the network lab, such as 2x2")
    parser.add_argument("--rate", default="1gbit", help="of a lab's links (default: 1gbit)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON, times in seconds")
    args = parser.parse_args()
    if "RANK" in os.environ:
        _run_rank(args.blocks, tuple(args.only.split(",")), args.width)
        return 0
    results: list[dict[str, Any]] = run_own_ranks(MODULE, args.ranks, args.lab, rate=args.rate, limit_s=LAB_S)
    # Floors are promised for two ranks of one host and the model's own width.
    floors = {} if args.lab or args.ranks != 2 or args.width != WIDTH else FLOORS
    lines = [COLUMNS, *(_job_line(result, floors.get(result["job"], 0.0)) for result in results)]
    print(json.dumps(results, indent=2) if args.json else "\n".join(lines))
    return int(any(result["ratio"] < floors.get(result["job"], 0.0) for result in results))


def _job_line(result: dict[str, Any], floor: float) -> str:
    """Return a job's row: times, ratio with quartiles, what a backend without time would reach, the floor."""
    gloo, ours, torch_s = result["gloo"], result["ringside"], result.get("fake", 0.0)
    times = " ".join(f"{result[side] * 1e3:9.3f}" if side in result else " " * 9 for side in SIDES)
    low, high = result["quartiles"]
    ratio = f"{result['ratio']:.2f}x ({low:.2f} to {high:.2f})"
    bound = f"{gloo / torch_s:6.1f}x" if torch_s else " " * 7
    net = f"{(gloo - torch_s) / (ours - torch_s):6.1f}x" if 0 < torch_s < ours else " " * 7
    reach = "MISSED" if not torch_s or gloo / torch_s >= floor else "out of reach"
    verdict = f"   {floor:g}x {'met' if result['ratio'] >= floor else reach}" if floor else ""
    return f"{result['job']:22} {times}   {ratio:24} {bound} {net}{verdict}".rstrip()


# ------------------------------------------------------------------------------------------------ on every rank


@process_group("ringside")
def _run_rank(blocks: int, only: tuple[str, ...], width: int) -> None:
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401 - makes the backend "fake" known

    gloo, fake = (dist.new_group(backend=side) for side in ("gloo", "fake"))
    groups = {"gloo": gloo, "ringside": dist.group.WORLD, "fake": fake}
    results = [
        {"job": name, **_take_turns(make, {s: g for s, g in groups.items() if (name, s) not in UNFIT}, blocks, times)}
        for name, (make, times) in _jobs_by_name(width).items()
        if name.startswith(only)
    ]
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)


def _take_turns(make: Callable[[Any], Step], groups: dict[str, Any], blocks: int, times: int) -> dict[str, Any]:
    """Run blocks of a job on the groups in turn."""
    steps = {side: make(group) for side, group in groups.items()}
    for side in steps:  # the first steps make buffers, and share them
        slowest_step_s(steps[side], max(times // 5, 6))
    took: dict[str, list[float]] = {side: [] for side in steps}
    for block in range(blocks):
        for side in steps if block % 2 else reversed(steps):
            took[side].append(slowest_step_s(steps[side], times))
    ratios = sorted(a / b for a, b in zip(took["gloo"], took["ringside"], strict=True))
    quartiles = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    return {"ratio": median(ratios), "quartiles": quartiles, **{side: median(took[side]) for side in steps}}


def _jobs_by_name(width: int) -> dict[str, tuple[Callable[[Any], Step], int]]:
    """Return by name what makes a job's step for a group, and how many steps a block has."""
    from torch.nn.parallel import DistributedDataParallel

    return {
        "all_reduce 4 KB": (lambda group: _all_reduce(group, 4 << 10), 200),
        "all_reduce 64 KB": (lambda group: _all_reduce(group, 64 << 10), 200),
        "all_reduce 16 MB": (lambda group: _all_reduce(group, 16 << 20), 5),
        "functional 4 KB": (lambda group: _functional_all_reduce(group, 4 << 10), 200),
        "functional 64 KB": (lambda group: _functional_all_reduce(group, 64 << 10), 200),
        "tensor-parallel layer": (_tensor_parallel, 30),
        "ddp": (lambda group: _training_step(DistributedDataParallel(_make_mlp(width), process_group=group), width), 2),
        "fsdp2": (lambda group: _training_step(_shard_mlp(group, width), width), 2),
        "fsdp2 shared": (lambda group: _fsdp2_shared(group, width, False), 2),
        "fsdp2 shared, gathers": (lambda group: _fsdp2_shared(group, width, True), 2),
    }


def _all_reduce(group: Any, size_bytes: int) -> Step:
    import torch
    import torch.distributed as dist

    x = torch.zeros(size_bytes // 4)
    return lambda: dist.all_reduce(x, group=group)


def _functional_all_reduce(group: Any, size_bytes: int) -> Step:
    import torch
    import torch.distributed._functional_collectives as functional

    x = torch.zeros(size_bytes // 4)
    return lambda: functional.wait_tensor(functional.all_reduce(x, "sum", group))


def _tensor_parallel(group: Any) -> Step:
    """A column-parallel and a row-parallel layer: one all-reduce of 16 KB in forward and one in backward."""
    import torch
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    mesh = _mesh_of(group)
    parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.randn(16, 256, requires_grad=True)
    return lambda: layer(x).sum().backward()


def _mesh_of(group: Any) -> Any:
    """Return a mesh with a name of its own: DTensor takes meshes of the same ranks and names for one and the same."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.name(),))


def _make_mlp(width: int) -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(*(m for _ in range(LAYERS) for m in (torch.nn.Linear(width, width), torch.nn.ReLU())))


def _training_step(model: Any, width: int) -> Step:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(BATCH, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def _fsdp2_shared(group: Any, width: int, gathers: bool) -> Step:
    """The same, and under ringside with buffers in shared memory: of reduce-scatters, or of all-gathers as well."""
    from torch.distributed.fsdp import FSDPModule

    from ringside.fsdp import SharedAllGather, SharedReduceScatter

    model, shared, gathered = _shard_mlp(group, width), SharedReduceScatter(), SharedAllGather()
    for module in model.modules():
        if isinstance(module, FSDPModule) and group.name() == "ringside":
            module.set_custom_reduce_scatter(shared)
            if gathers:
                module.set_custom_all_gather(gathered)
    return _training_step(model, width)


def _shard_mlp(group: Any, width: int) -> Any:
    import torch
    from torch.distributed.fsdp import fully_shard

    model, mesh = _make_mlp(width), _mesh_of(group)
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    sys.exit(main())

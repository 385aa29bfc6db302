"""Tensor parallelism on the process group "ringside": a layer cut by columns, the next by rows.

torchrun --nproc-per-node 2 examples/process_group_tensor_parallel.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringside  # noqa: F401 - makes the backend known (torch finds it by itself since 2.5)
from ringside.pytorch import carried


def main() -> None:
    """Compare a layer that all ranks have cut up with the whole one, and print on rank 0 who carried what."""
    dist.init_process_group("ringside")
    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    x = torch.randn(8, 64)
    expected = whole(x)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = parallelize_module(whole, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    got = cut(x)
    got.sum().backward()
    if dist.get_rank() == 0:
        print("same as on one rank:", torch.allclose(got, expected, atol=1e-5))
        print("carried by", ", ".join(carried()))
        print("all-reduces:", carried()["ringside"]["all_reduce"] > 0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""FSDP2 on the process group "ringside": a script as for Gloo, and one extension that saves a copy.

torchrun --nproc-per-node 2 examples/process_group_fsdp.py
"""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard

import ringside  # noqa: F401 - makes the backend known (torch finds it by itself since 2.5)
from ringside.fsdp import SharedReduceScatter
from ringside.pytorch import carried


def main() -> None:
    """Train a sharded MLP a few steps, and print on rank 0 what was learned and who carried it."""
    dist.init_process_group("ringside")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    shared = SharedReduceScatter()  # the input of the reduce-scatter lies where the other ranks can read it
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(shared)

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(30):
        x = torch.randn(64, 32)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.1f} -> {losses[-1]:.1f}")
        print("carried by", ", ".join(carried()))
        print("reduce-scatters", carried()["ringside"]["reduce_scatter_shared"])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""DDP's own options, one per run: unused parameters, a static graph, gradients as views of buckets, ignored ones."""

import sys

import torch
import torch.distributed as dist
from kit import CLASSES, FEATURES, batches, begin, keep, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

OPTIONS = {
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "all": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "init_sync": False},
}


class Paths(nn.Module):
    def __init__(self):
        super().__init__()
        self.start = nn.Linear(FEATURES, 48)
        self.left, self.right = nn.Linear(48, CLASSES), nn.Linear(48, CLASSES)

    def forward(self, x, side):
        hidden = checkpoint(self.start, x, use_reentrant=False).relu()
        return (self.left if side else self.right)(hidden)


def main():
    option = sys.argv[1]
    rank, _ = begin()
    net = Paths()
    if option not in ("unused", "all"):
        DDP._set_params_and_buffers_to_ignore_for_model(net, ["right.weight", "right.bias"])
    model = DDP(net, bucket_cap_mb=0.001, **OPTIONS[option])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kinds = set()
    for step, (x, y) in enumerate(batches(9, rank)):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        side = (step + rank) % 3 != 0 if option in ("unused", "all") else True
        nn.functional.cross_entropy(model(x, side), y).backward()
        kinds.add(" ".join("None" if p.grad is None else str(tuple(p.grad.stride())) for p in model.parameters()))
        optimizer.step()
    say(f"rank {rank}: {sorted(kinds)}")
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A model whose parameters, and so its gradients, are halves: float16 or bfloat16."""

import sys

import torch
import torch.distributed as dist
from kit import CLASSES, FEATURES, begin, keep, say, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Half(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)).to(dtype)
        self.dtype = dtype

    def forward(self, x):
        return self.body(x.to(self.dtype)).float()


def main():
    rank, _ = begin()
    model = DDP(Half(getattr(torch, sys.argv[1])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # each step's gradients are those of the same parameters
    train(model, optimizer, 3, rank, after=lambda step: keep(f"step{step}", model))
    say(f"rank {rank}: {next(model.parameters()).dtype}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

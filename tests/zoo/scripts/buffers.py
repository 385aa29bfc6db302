"""Batch normalisation whose running statistics DDP broadcasts, a buffer that the module replaces, and an odd one."""

import torch
import torch.distributed as dist
from kit import CLASSES, FEATURES, begin, keep, say, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Normed(nn.Module):
    mean: torch.Tensor
    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, CLASSES))
        self.register_buffer("mean", torch.zeros(CLASSES))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        output = self.body(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * output.detach().mean(0)
            self.calls += 1
        return output


def main():
    rank, _ = begin()
    model = DDP(Normed())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 6, rank)
    keep("model", model)
    kept = DDP(Normed(), broadcast_buffers=False)
    train(kept, torch.optim.SGD(kept.parameters(), lr=0.1), 6, rank)
    keep("kept", kept)
    model.eval()
    with torch.no_grad():
        say(f"rank {rank}: {model(torch.ones(1, FEATURES)).sum().item():.6f}, {int(model.module.calls)} calls")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

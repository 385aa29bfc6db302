"""DataLoaders with workers, fork or spawn, for training and for validation; 36 MB of gradients on every rank."""

import sys

import torch
import torch.distributed as dist
from kit import begin, say
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pictures(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((512, 1024), index / 24)  # 2 MB


def main():
    way, width = sys.argv[1], int(sys.argv[2])
    rank, _ = begin()
    layers = [nn.Linear(width, width, bias=False) for _ in range(9)]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=8, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    workers = {"num_workers": 2 if way == "fork" else 1, "multiprocessing_context": way, "batch_size": 2}
    sampler = DistributedSampler(Pictures())
    training = DataLoader(Pictures(), sampler=sampler, persistent_workers=True, **workers)
    validation = DataLoader(Pictures(), **workers)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x in training:
            optimizer.zero_grad()
            model(x[:, :4, :width]).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            worth = sum(float(model.module(x[:, :4, :width]).abs().sum()) for x in validation)
        say(f"rank {rank}: epoch {epoch}, {worth:.6f}")
    torch.save([layer.weight.sum(1) for layer in model.module], f"sums.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Ranks with different numbers of batches: Join, divided by all ranks or by those that still take part."""

import sys

import torch
import torch.distributed as dist
from kit import Net, batches, begin, keep, say
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    by_all = sys.argv[1] == "all"
    rank, _ = begin()
    model = DDP(Net(), bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with Join([model], divide_by_initial_world_size=by_all):
        for x, y in batches(3 + 4 * rank, rank):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(f"{loss.item():.6f}")
    with model.join(divide_by_initial_world_size=by_all):
        for x, y in batches(4 - rank, rank):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    say(f"rank {rank}: {' '.join(losses)}")
    keep("model", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""torch.compile around the DDP model."""

import sys

import torch
import torch.distributed as dist
from kit import Net, begin, keep, say, train
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    rank, _ = begin()
    model = DDP(Net())
    compiled = torch.compile(model, backend=sys.argv[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(compiled, optimizer, 6, rank)
    inside = DDP(torch.compile(Net(), backend=sys.argv[1]))
    train(inside, torch.optim.SGD(inside.parameters(), lr=0.1), 6, rank)
    say(f"rank {rank}: {len(list(model.parameters()))} parameters")
    keep("outside", model)
    keep("inside", inside)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
